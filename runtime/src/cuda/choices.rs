//! What computes where a vendor's library and dcc's own kernels both can: timed once, before anything is loaded. What won is kept beside the
//! machine code, so that later runs, and all ranks of one process, take the same and repeat to the bit.

use super::cache;
use super::queue::Stream;
use crate::error::Result;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A timing takes about so long.
const TIMING: Duration = Duration::from_millis(3);
const ROUNDS: usize = 3;
/// Runs of a round at most.
const MOST_RUNS: f64 = 200.0;

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// dcc's kernel; of a product with a tail, that of both.
    Own,
    /// An algorithm of the library, as it may be kept.
    Library([u64; 8]),
    /// Of a product with a tail: one after the other.
    Apart,
}

/// What is chosen, by what it is for, in all of this process.
static CHOSEN: Mutex<BTreeMap<String, Choice>> = Mutex::new(BTreeMap::new());

/// What was chosen before, in this process or another, or is now: of one product by one rank, while others choose for others.
pub fn chosen(key: String, choose: impl FnOnce() -> Result<Choice>) -> Result<Choice> {
    let turn = cache::turn(&key);
    let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
    let known = || {
        let mut chosen = lock();
        if chosen.is_empty() {
            *chosen = load();
        }
        chosen.get(&key).copied()
    };
    if let Some(choice) = known() {
        return Ok(choice);
    }
    let choice = choose()?;
    let mut chosen = lock();
    chosen.insert(key, choice);
    save(&chosen);
    Ok(choice)
}

/// The time of one of many runs, the least of a few rounds; as steps run, without the host's part.
pub fn timed(stream: &Stream, start: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
    start()?;
    stream.wait()?;
    let mut round = |runs: u32| -> Result<Duration> {
        stream.begin_graph()?;
        let started = (0..runs).try_for_each(|_| start());
        let graph = stream.end_graph();
        started?;
        let graph = graph?;
        let run = || -> Result<Duration> {
            let began = Instant::now();
            // SAFETY: what is timed works on memory that lives as long as the stream.
            unsafe { stream.run(&graph)? };
            stream.wait()?;
            Ok(began.elapsed() / runs)
        };
        // The first brings the graph to the GPU, and its clock up.
        run()?;
        run()
    };
    let once = round(1)?.max(Duration::from_micros(1));
    let runs = (TIMING.as_secs_f64() / once.as_secs_f64()).clamp(1.0, MOST_RUNS) as u32;
    (0..ROUNDS).map(|_| round(runs)).try_fold(Duration::MAX, |least, took| Ok(least.min(took?)))
}

fn lock() -> MutexGuard<'static, BTreeMap<String, Choice>> {
    CHOSEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether there is a folder to keep choices in.
pub fn are_kept() -> bool {
    file().is_some()
}

/// Where choices are kept.
fn file() -> Option<PathBuf> {
    Some(cache::folder()?.join("choices"))
}

/// A line for each: the algorithm's words, `own` or `apart`, then what it is for. Lines of another form are none.
fn load() -> BTreeMap<String, Choice> {
    let text = file().and_then(|file| std::fs::read_to_string(file).ok()).unwrap_or_default();
    text.lines().filter_map(parse).collect()
}

fn parse(line: &str) -> Option<(String, Choice)> {
    let (choice, key) = line.split_once('\t')?;
    let words = || choice.split(' ').map(|word| u64::from_str_radix(word, 16).ok()).collect::<Option<Vec<u64>>>();
    let choice = match choice {
        "own" => Choice::Own,
        "apart" => Choice::Apart,
        _ => Choice::Library(words()?.try_into().ok()?),
    };
    Some((key.to_owned(), choice))
}

fn line(key: &str, choice: &Choice) -> String {
    let choice = match choice {
        Choice::Own => "own".to_owned(),
        Choice::Apart => "apart".to_owned(),
        Choice::Library(words) => words.map(|word| format!("{word:x}")).join(" "),
    };
    format!("{choice}\t{key}\n")
}

fn save(chosen: &BTreeMap<String, Choice>) {
    let Some(file) = file() else { return };
    let text: String = chosen.iter().map(|(key, choice)| line(key, choice)).collect();
    if let Err(error) = cache::replace(&file, &[text.as_bytes()]) {
        tracing::debug!(file = %file.display(), %error, "choices are not kept");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_were_kept() {
        for choice in [Choice::Own, Choice::Apart, Choice::Library([1, 2, 3, u64::MAX, 0, 6, 7, 8])] {
            let kept = line("GPU x Gemm { rows: 3 }", &choice);
            assert_eq!(parse(kept.trim_end()), Some(("GPU x Gemm { rows: 3 }".to_owned(), choice)));
        }
        for damaged in ["", "own", "1 2 3\tx", "1 2 3 4 5 6 7 g\tx"] {
            assert_eq!(parse(damaged), None, "{damaged}");
        }
    }
}
