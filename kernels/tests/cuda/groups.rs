//! Launches of several nests as one: bit by bit what each does alone.

use crate::emulation::{Bug, Expected, Job, Planted, check_equal, check_planted};
use crate::generated::{CROSS_ENTROPY, Case, DROPOUT, ELEMENTWISE, NORM, WIDE_COLUMNS};
use dcc_kernels::cuda::group::{Argument, Kind};
use dcc_kernels::cuda::{Launch, Source};

/// The nests, and how often each is there. All blocks have 256 threads but those of the last two, which have 512.
const CASES: [(Case, usize); 5] = [(ELEMENTWISE, 3), (WIDE_COLUMNS, 2), (DROPOUT, 1), (CROSS_ENTROPY, 1), (NORM, 2)];
/// Groups in the order in which they run: case and launch of each kind.
const GROUPS: [&[(usize, usize)]; 4] = [&[(0, 0), (1, 0), (2, 0)], &[(3, 0), (4, 0)], &[(1, 1)], &[(4, 1)]];

/// By case, one job for each of its members.
fn alone(name: &str) -> Vec<Vec<Job>> {
    let of = |(n, (case, count)): (usize, &(Case, usize))| {
        (0..*count).map(|seed| case.job_of(&format!("{name}_{n}_{seed}"), seed)).collect()
    };
    CASES.iter().enumerate().map(of).collect()
}

/// All in four groups. Kernels with plain arguments call those that have a table.
fn grouped(name: &str) -> Job {
    let cases = alone(name);
    let members = |n: usize| &cases[n];
    let (mut text, mut launches) = (String::new(), Vec::new());
    let all: Vec<&Job> = cases.iter().flatten().collect();
    let workspace: usize = all.iter().map(|job| job.source.workspace).sum();
    let pointers: Vec<String> = (0..all.iter().map(|job| job.operands.len()).sum()).map(|n| format!("char* p{n}")).collect();
    for (number, group) in GROUPS.iter().enumerate() {
        let group_name = format!("{name}_group{number}");
        let kind = |&(n, launch): &(usize, usize)| Kind { source: &members(n)[0].source, launch, members: members(n).len() };
        let source = Source::group(&group_name, &group.iter().map(kind).collect::<Vec<_>>()).expect("a source");
        let mut words = Vec::new();
        for &(n, launch) in *group {
            for member in members(n) {
                let before = all.iter().take_while(|job| !std::ptr::eq(**job, member));
                let first: usize = before.clone().map(|job| job.operands.len()).sum();
                let part: usize = before.map(|job| job.source.workspace).sum();
                words.extend(member.source.bodies[launch].arguments.iter().map(|argument| match argument {
                    Argument::Operand(n) => format!("(long long)p{}", first + n),
                    Argument::Workspace => format!("(long long)(workspace + {part})"),
                    Argument::Parameter(_) => "0".to_owned(),
                }));
            }
        }
        assert_eq!(words.len(), source.table);
        let (entry, arguments, words) = (format!("call_{group_name}"), pointers.join(", "), words.join(", "));
        text += &format!(
            "{}extern \"C\" __global__ void {entry}({arguments}, char* workspace) {{\n    const {group_name}_table table = \
             {{{{{words}}}}};\n    {group_name}(table);\n}}\n",
            source.text
        );
        launches.push(Launch { entry, ..source.launches[0].clone() });
    }
    let (mut operands, mut expected) = (Vec::new(), Vec::new());
    for job in &all {
        let first = operands.len();
        let own = |e: &Expected| Expected { operand: first + e.operand, dtype: e.dtype, values: e.values.clone() };
        expected.extend(job.expected.iter().map(own));
        operands.extend(job.operands.iter().cloned());
    }
    let operand_bytes = operands.iter().map(Vec::len).collect();
    let source = Source { text, launches, workspace, operand_bytes, ..Source::default() };
    Job { what: "a group".to_owned(), source, operands, expected }
}

#[test]
fn a_group_does_what_each_does_alone() {
    let job = grouped("one");
    let pieces = job.source.text.matches("const int piece").count();
    assert_eq!((job.source.launches.len(), pieces), (4, 2), "{}", job.source.text);
    let alone: Vec<Job> = alone("by_itself").into_iter().flatten().collect();
    check_equal("a_group_does_what_each_does_alone", &[(&job, alone.iter().collect())]);
}

/// What has no place in a group: blocks of other sizes, tables of more words than arguments have.
#[test]
fn groups_have_bounds() {
    let cases = alone("bounds");
    let kind = |n: usize, members: usize| Kind { source: &cases[n][0].source, launch: 0, members };
    assert!(Source::group("g", &[kind(0, 1), kind(2, 1)]).is_ok());
    assert!(Source::group("g", &[kind(0, 1), kind(3, 1)]).is_err_and(|what| what.contains("threads")));
    assert!(Source::group("g", &[kind(0, 170)]).is_ok() && Source::group("g", &[kind(0, 171)]).is_err(), "512 words");
}

pub fn planted() -> Vec<Planted> {
    let bugs = [
        (Bug::Index, "all - 0, member = own /", "all - 0, member = 0 * own /"),
        (Bug::Index, "table.words + 0 + member", "table.words + 1 + member"),
        (Bug::Tail, "if (all < ", "if (1 + all < "),
        (Bug::MissingPart, "block % 2, block / 2", "block % 2, block / 3"),
    ];
    let one = |(n, (kind, from, to))| Planted { kind, job: grouped(&format!("planted_{n}")), from, to };
    bugs.into_iter().enumerate().map(one).collect()
}

#[test]
fn planted_bugs_of_groups() {
    check_planted("planted_bugs_of_groups", planted(), vec![grouped("sound")]);
}
