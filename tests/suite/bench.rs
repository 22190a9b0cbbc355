//! `dcc bench`: its figures are there and make sense.

use crate::command::dcc;
use serde_json::Value;

#[test]
fn collectives_are_timed_by_size() {
    let figures = dcc(["bench", "comm", "--ranks", "2", "3", "--max-bytes", "4KiB", "--json"]).ok().json();
    let figures = figures.as_array().expect("a list");
    for ranks in [2, 3] {
        for kind in ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"] {
            let of = |figure: &&Value| figure["ranks"] == ranks && figure["kind"] == kind;
            let mine: Vec<&Value> = figures.iter().filter(of).collect();
            let sizes: Vec<u64> = mine.iter().map(|figure| figure["bytes"].as_u64().expect("bytes")).collect();
            assert_eq!(sizes, [4, 16, 64, 256, 1024, 4096], "{ranks} {kind}");
            for figure in mine {
                let number = |key: &str| figure[key].as_f64().expect("a number");
                let others = f64::from(ranks - 1) / f64::from(ranks);
                let traffic = if kind == "send" { 1.0 } else { others * if kind == "all_reduce" { 2.0 } else { 1.0 } };
                let bandwidth = traffic * number("bytes") / (1e3 * number("microseconds"));
                assert!(number("microseconds") > 0.0 && (number("bandwidth") / bandwidth - 1.0).abs() < 1e-9, "{figure}");
            }
        }
    }
}

#[test]
fn what_cannot_be_measured_is_refused() {
    for (words, what) in [(["--ranks", "1"], "1 is not in 2..=64"), (["--max-bytes", "lots"], "--max-bytes lots is no size")] {
        let output = dcc(["bench", "comm"].into_iter().chain(words));
        assert_eq!(output.code, Some(2), "{}", output.stderr);
        assert!(output.stderr.contains(what), "{}", output.stderr);
    }
}
