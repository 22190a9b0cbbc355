//! What `dcc compile` tells: `tests/golden/report/*.txt` hold a model of `tests/models` with flags, flags of a control, and what
//! the command prints (first stderr, then stdout), seconds left out. The control must print something else.
//!
//! `show=KEY,KEY` before the model keeps these keys of `--json` only, and no stderr.

use super::{END, cases, hold, read};
use crate::command::{Folder, dcc_command, finish, spawn};
use crate::tidy::root;
use serde_json::Value;

/// Everything that `dcc compile MODEL FLAGS` prints, in a folder that has the model alone.
fn printed(command: &str, show: Option<&str>) -> String {
    let folder = Folder::new();
    let model = command.split(' ').next().expect("a model");
    std::fs::copy(root().join("tests/models").join(model), folder.at(model)).unwrap_or_else(|e| panic!("{model}: {e}"));
    let mut process = dcc_command();
    process.arg("compile").args(command.split_whitespace()).current_dir(folder.path());
    let output = finish(spawn(&mut process));
    let untimed = |line: &str| match line.split_once(" in ") {
        Some((done, _)) if line.starts_with("  Finished ") => format!("{done} in … s\n"),
        _ => format!("{line}\n"),
    };
    let told: String = output.stderr.lines().map(untimed).filter(|_| show.is_none()).collect();
    let exit = if output.code == Some(0) { String::new() } else { format!("exit {}\n", output.code.expect("an exit code")) };
    let data = match show {
        None => output.stdout,
        Some(keys) => {
            let mut value = serde_json::from_str::<serde_json::Map<String, Value>>(&output.stdout).expect("an object");
            value.retain(|key, _| keys.split(',').any(|wanted| wanted == key));
            serde_json::to_string_pretty(&value).expect("plain data") + "\n"
        }
    };
    told + &data + &exit
}

#[test]
fn report() {
    for path in cases("report") {
        let whole = read(&path);
        let input = whole.split_once(END).map_or(whole.as_str(), |(input, _)| input);
        let [command, control] = input.lines().collect::<Vec<_>>()[..] else {
            panic!("{}: a command and its control", path.display());
        };
        let (show, command) = match command.strip_prefix("show=").and_then(|rest| rest.split_once(' ')) {
            Some((keys, command)) => (Some(keys), command),
            None => (None, command),
        };
        let control = control.strip_prefix("control: ").expect("the second line is control: MODEL FLAGS");
        let output = printed(command, show);
        assert!(output != printed(control, show), "{}: the control tells the same", path.display());
        hold(&path, input, &output);
    }
}
