//! Kernels for GPUs, as texts.

use dcc_program::program::Program;
use dcc_runtime::exec::{World, texts};

#[test]
fn cuda() {
    super::check("cuda");
}

/// Those of rank 0 that `show` names, all without it.
pub fn kernels(programs: &[Program], show: Option<&str>) -> String {
    let world = World::new(&[programs]).expect("programs of one mesh");
    let texts = texts(&world, &programs[0], 0).expect("kernels for GPUs");
    let mut out = String::new();
    for source in &texts.sources() {
        let is_meant = |show: &str| show.split(',').any(|word| source.launches.iter().any(|launch| launch.entry == word));
        if show.is_some_and(|show| !is_meant(show)) {
            continue;
        }
        for launch in &source.launches {
            let ([x, y], threads) = (launch.blocks, launch.threads);
            out += &format!(
                "// {}: {x} x {y} blocks of {threads} threads, {} bytes of shared memory\n",
                launch.entry, launch.shared
            );
        }
        if source.workspace > 0 {
            out += &format!("// {} bytes of workspace\n", source.workspace);
        }
        out += &own(&source.text);
    }
    out
}

/// A text without what stands between `#ifndef` and its `#endif`, and what is said there.
fn own(text: &str) -> String {
    let mut depth = 0;
    let mut out = String::new();
    for line in text.lines() {
        depth += i32::from(line.starts_with("#if"));
        if depth == 0 && !line.starts_with("//") && !line.is_empty() {
            out += line;
            out.push('\n');
        }
        depth -= i32::from(line.starts_with("#endif"));
    }
    out
}
