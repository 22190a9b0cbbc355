//! The batch triple: global batch B, microbatch m of one data-parallel rank, microbatches M of a step; B = m · dp · ep · M.

use crate::error::{Error, Result};
use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Samples of one optimizer step.
    pub global: u64,
    /// Samples of one microbatch on one data-parallel rank.
    pub micro: u64,
    /// Microbatches of a step: the size of the axis `mb`.
    pub accumulate: u32,
}

/// The ranks that a batch is divided among, called data-parallel: `--dp` × `--ep`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ranks {
    pub dp: u32,
    pub ep: u32,
}

impl Ranks {
    pub fn count(self) -> u64 {
        u64::from(self.dp) * u64::from(self.ep)
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "--dp {}", self.dp)?;
        if self.ep > 1 { write!(f, " × --ep {}", self.ep) } else { Ok(()) }
    }
}

/// What the command line gives of the triple.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// `--global-batch-size`
    pub global: Option<u64>,
    /// `--micro-batch-size`
    pub micro: Option<u64>,
    /// `--grad-accum`
    pub accumulate: Option<u32>,
    /// The model's own batch where its export is static, or the slice under `--layout steps`; counts where B is not given.
    pub model: Option<u64>,
    /// The groups of a model with BatchNorm, which the microbatches must divide.
    pub groups: Option<u64>,
}

/// Any two of the triple fix the third. Defaults: B from the model; M = pp where that divides a rank's share of B, else the largest
/// divisor of the share below it. Errors: a B that is neither given nor the model's, contradictions, with the arithmetic.
pub fn resolve(given: Given, ranks: Ranks, pp: u32) -> Result<Batch> {
    let batch = split(given, ranks, pp)?;
    let microbatches = u64::from(batch.accumulate);
    match given.groups {
        Some(groups) if !groups.is_multiple_of(microbatches) => Err(Error::batch(format!(
            "{groups} groups that BatchNorm takes statistics of do not divide into {microbatches} microbatches"
        ))
        .help(format!(
            "use --grad-accum 1, or --bn-groups {microbatches} for statistics of {} samples each",
            batch.global / microbatches
        ))),
        _ => Ok(batch),
    }
}

fn split(given: Given, ranks: Ranks, pp: u32) -> Result<Batch> {
    for (flag, value) in [
        ("--global-batch-size", given.global),
        ("--micro-batch-size", given.micro),
        ("--grad-accum", given.accumulate.map(u64::from)),
        ("--dp", Some(u64::from(ranks.dp))),
        ("--ep", Some(u64::from(ranks.ep))),
        ("--pp", Some(u64::from(pp))),
    ] {
        if value == Some(0) {
            return Err(Error::usage(format!("{flag} 0")).help(format!("{flag} is at least 1")));
        }
    }
    if let (Some(micro), Some(accumulate)) = (given.micro, given.accumulate) {
        return product(given, micro, accumulate, ranks);
    }
    let Some(global) = given.global.or(given.model) else {
        return Err(Error::unbound("the global batch is unknown: the model leaves its batch dim open")
            .help("add --global-batch-size B"));
    };
    let count = ranks.count();
    if !global.is_multiple_of(count) {
        return Err(Error::batch(format!("global batch {global} does not divide by {ranks}"))
            .note(format!("{global} = {count} × {} + {}", global / count, global % count))
            .help(format!("use --global-batch-size {}", (global / count).max(1) * count)));
    }
    let share = global / count;
    let accumulate = match (given.micro, given.accumulate) {
        (Some(micro), _) => divide(global, ranks, micro, "--micro-batch-size")?,
        (_, Some(accumulate)) => {
            divide(global, ranks, u64::from(accumulate), "--grad-accum")?;
            u64::from(accumulate)
        }
        _ => {
            let fits = |m: &u64| share.is_multiple_of(*m) && given.groups.is_none_or(|groups| groups.is_multiple_of(*m));
            (1..=u64::from(pp).min(share)).rev().find(fits).unwrap_or(1)
        }
    };
    let count = u32::try_from(accumulate).map_err(|_| {
        Error::batch(format!("{accumulate} microbatches are more than 2^32")).help("use a larger --micro-batch-size")
    })?;
    Ok(Batch { global, micro: share / accumulate, accumulate: count })
}

fn product(given: Given, micro: u64, accumulate: u32, ranks: Ranks) -> Result<Batch> {
    let global = micro
        .checked_mul(ranks.count())
        .and_then(|b| b.checked_mul(u64::from(accumulate)))
        .ok_or_else(|| Error::batch(format!("{micro} × {} × {accumulate} samples are beyond 2^64", ranks.count())))?;
    match given.global {
        Some(wanted) if wanted != global => Err(Error::batch(format!(
            "--global-batch-size {wanted} is not --micro-batch-size {micro} × {ranks} × --grad-accum {accumulate} = {global}"
        ))
        .help(format!("drop one of the three, or use --global-batch-size {global}"))),
        _ => Ok(Batch { global, micro, accumulate }),
    }
}

/// B / (ranks · part), exactly.
fn divide(global: u64, ranks: Ranks, part: u64, flag: &str) -> Result<u64> {
    let share = global / ranks.count();
    if share.is_multiple_of(part) {
        return Ok(share / part);
    }
    let fits: Vec<String> = divisors(share).iter().map(u64::to_string).collect();
    Err(Error::batch(format!("global batch {global} / {ranks} = {share} samples do not divide by {flag} {part}"))
        .note(format!("{share} = {part} × {} + {}", share / part, share % part))
        .help(format!("{flag} can be {}", fits.join(", "))))
}

/// At most the 16 smallest.
fn divisors(n: u64) -> Vec<u64> {
    (1..=n.min(4096)).filter(|d| n.is_multiple_of(*d)).take(16).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(global: Option<u64>, micro: Option<u64>, accumulate: Option<u32>, model: Option<u64>, dp: u32, pp: u32) -> String {
        match resolve(Given { global, micro, accumulate, model, groups: None }, Ranks { dp, ep: 1 }, pp) {
            Ok(b) => format!("{} = {} × {dp} × {}", b.global, b.micro, b.accumulate),
            Err(e) => e.to_string(),
        }
    }

    #[test]
    fn two_of_three_fix_the_third() {
        assert_eq!(check(Some(64), Some(8), None, None, 2, 1), "64 = 8 × 2 × 4");
        assert_eq!(check(Some(64), None, Some(8), None, 2, 1), "64 = 4 × 2 × 8");
        assert_eq!(check(None, Some(3), Some(5), Some(1), 2, 1), "30 = 3 × 2 × 5");
    }

    #[test]
    fn microbatches_default_to_the_stages() {
        assert_eq!(check(Some(64), None, None, None, 2, 4), "64 = 8 × 2 × 4");
        assert_eq!(check(None, None, None, Some(6), 1, 4), "6 = 2 × 1 × 3");
        assert_eq!(check(None, None, None, Some(7), 1, 4), "7 = 7 × 1 × 1");
        assert_eq!(check(None, None, None, Some(2), 1, 4), "2 = 1 × 1 × 2");
    }

    #[test]
    fn microbatches_divide_the_groups_of_batch_norm() {
        let of = |groups, accumulate| {
            let given = Given { global: Some(64), accumulate, groups: Some(groups), ..Given::default() };
            resolve(given, Ranks { dp: 2, ep: 1 }, 4).map(|batch| batch.accumulate)
        };
        assert_eq!((of(1, None), of(2, None), of(6, None)), (Ok(1), Ok(2), Ok(2)));
        assert_eq!(of(8, Some(4)), Ok(4));
        assert_eq!(of(1, Some(4)).unwrap_err().code.0, 302);
    }

    #[test]
    fn contradictions_show_their_arithmetic() {
        assert_eq!(
            check(Some(64), Some(8), Some(2), None, 2, 1),
            "error[DCC0302]: --global-batch-size 64 is not --micro-batch-size 8 × --dp 2 × --grad-accum 2 = 32\n  \
             help drop one of the three, or use --global-batch-size 32"
        );
        assert_eq!(
            check(Some(10), None, Some(4), None, 1, 1),
            "error[DCC0302]: global batch 10 / --dp 1 = 10 samples do not divide by --grad-accum 4\n  note 10 = 4 × 2 + 2\n  \
             help --grad-accum can be 1, 2, 5, 10"
        );
        assert_eq!(
            check(Some(10), None, None, None, 4, 1),
            "error[DCC0302]: global batch 10 does not divide by --dp 4\n  note 10 = 4 × 2 + 2\n  help use --global-batch-size 8"
        );
        assert!(check(None, Some(2), None, None, 1, 1).starts_with("error[DCC0002]"));
        assert!(check(Some(0), None, None, None, 1, 1).starts_with("error[DCC0001]"));
    }
}
