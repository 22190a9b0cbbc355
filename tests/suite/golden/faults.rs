//! What the gate says, as a user meets it: `tests/golden/check/*.txt` hold sound programs (of `runtime/program/tests/programs`),
//! faults as edits of their text, and what `dcc verify` answers to an artifact with such programs.
//!
//! The first line names the programs of all stages. `# title` begins a fault; its lines are found from the top on: `  line`
//! stays, `- line` goes, `+ line` comes after what was found last. In programs of several stages the stage follows the sign
//! (`-1 line`). The programs as they are come first in the output, and no fault may get the same answer.

use super::{END, cases, hold, read};
use crate::command::{Folder, dcc_command, finish, spawn};
use crate::tidy::root;
use dcc::Error;
use dcc_program::artifact::{Artifact, Data, Tensor};
use dcc_program::check::{CheckError, Fault};
use dcc_program::program::{ParamKind, Program};
use dcc_program::text;
use expect_test::expect;

struct Case {
    /// Texts of the stages.
    stages: Vec<String>,
    /// Title and edits.
    faults: Vec<(String, Vec<String>)>,
}

impl Case {
    fn parse(input: &str) -> Case {
        let (head, rest) = input.split_once('\n').expect("a case begins with its programs");
        let names = head.strip_prefix("programs=").expect("the first line is programs=NAME,NAME");
        let program = |name: &str| read(&root().join(format!("runtime/program/tests/programs/{name}.txt")));
        let mut faults: Vec<(String, Vec<String>)> = Vec::new();
        for line in rest.lines() {
            match (line.strip_prefix("# "), faults.last_mut()) {
                (Some(title), _) => faults.push((title.to_owned(), Vec::new())),
                (None, Some((_, edits))) => edits.push(line.to_owned()),
                (None, None) => panic!("{line}: an edit before the title of its fault"),
            }
        }
        Case { stages: names.split(',').map(program).collect(), faults }
    }

    fn edited(&self, edits: &[String]) -> Vec<String> {
        let mut stages: Vec<Vec<&str>> = self.stages.iter().map(|text| text.lines().collect()).collect();
        let mut at = vec![0; stages.len()];
        for edit in edits {
            let (head, line) = edit.split_at(2);
            let digit = head[1..].parse::<usize>();
            // After a digit comes a space.
            let (stage, line) = digit.map_or((0, line), |stage| (stage, &line[1..]));
            let lines = &mut stages[stage];
            if head.starts_with('+') {
                lines.insert(at[stage], line);
                at[stage] += 1;
                continue;
            }
            let found = lines[at[stage]..].iter().position(|other| *other == line);
            at[stage] += found.unwrap_or_else(|| panic!("nothing to edit: {edit}"));
            if head.starts_with('-') {
                lines.remove(at[stage]);
            } else {
                at[stage] += 1;
            }
        }
        stages.iter().map(|lines| lines.join("\n")).collect()
    }
}

/// An artifact of these training programs, whose weights have no data.
fn artifact(stages: &[String]) -> Artifact {
    let train: Vec<Program> =
        stages.iter().map(|stage| text::parse(stage).unwrap_or_else(|e| panic!("{e}\n{stage}"))).collect();
    let weights =
        train.iter().flat_map(|p| p.params.iter().filter(|x| x.kind == ParamKind::Weight).map(move |x| (x, p.ty(x.buffer))));
    let tensor = |(param, ty): (&dcc_program::program::Param, &dcc_program::TensorType)| Tensor {
        name: param.name.clone(),
        dtype: ty.dtype,
        shape: ty.shape.clone(),
        data: Data::Absent,
    };
    Artifact { tensors: weights.map(tensor).collect(), train, ..Artifact::default() }
}

/// What `dcc verify` prints, hashes left out.
fn verified(folder: &Folder, stages: &[String]) -> String {
    let mut file = std::fs::File::create(folder.at("case.dcc")).expect("a file");
    artifact(stages).write(&mut file).expect("an artifact");
    let output = finish(spawn(dcc_command().args(["verify", "case.dcc"]).current_dir(folder.path())));
    let lines = output.stderr.lines().chain(output.stdout.lines()).filter(|line| !line.starts_with("hash "));
    let text: String = lines.map(|line| format!("{line}\n")).collect();
    assert_eq!(output.code, Some(if output.stderr.is_empty() { 0 } else { 5 }), "{text}");
    text
}

#[test]
fn check() {
    let folder = Folder::new();
    for path in cases("check") {
        let whole = read(&path);
        let input = whole.split_once(END).map_or(whole.as_str(), |(input, _)| input);
        let case = Case::parse(input);
        let sound = verified(&folder, &case.stages);
        assert!(sound.contains(" hold "), "{}: {sound}", path.display());
        let mut output = sound.clone();
        for (title, edits) in &case.faults {
            let found = verified(&folder, &case.edited(edits));
            assert!(found != sound, "{}: {title} is no fault", path.display());
            output += &format!("# {title}\n{found}");
        }
        hold(&path, input, &output);
    }
}

#[test]
fn a_compiler_that_the_gate_refuses_is_a_bug() {
    let found = CheckError { code: Fault::Pending, message: "b1 is a partial sum".to_owned(), at: "stage 0".to_owned() };
    expect![[r#"
        error[DCC1001]: the compiled programs do not pass the gate: b1 is a partial sum (DCC0537)
          at   stage 0
          help this is a bug in dcc; please report it with the model"#]]
    .assert_eq(&Error::gate(found).to_string());
}
