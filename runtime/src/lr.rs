//! Learning rates: what a schedule gives each step, known without a device.

/// `--lr`, `--lr-schedule`, `--warmup`, `--min-lr` and the number of steps of the whole run.
#[derive(Clone, Debug, PartialEq)]
pub struct LearningRate {
    pub lr: f64,
    pub min_lr: f64,
    pub schedule: Schedule,
    pub warmup: u64,
    pub steps: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Schedule {
    Constant,
    /// From `lr` to `min_lr` at the last step's end.
    Linear,
    Cosine,
    /// Times `factor` after each `every` steps.
    Step {
        every: u64,
        factor: f64,
    },
    /// One rate per step, from a file; nothing else has a say.
    Rates(Vec<f64>),
}

impl Schedule {
    /// `constant`, `linear`, `cosine`, `step:EVERY:FACTOR`. `Err` says what is wrong. `@FILE` is its caller's: see `rates`.
    pub fn parse(text: &str) -> Result<Schedule, String> {
        match text {
            "constant" => return Ok(Schedule::Constant),
            "linear" => return Ok(Schedule::Linear),
            "cosine" => return Ok(Schedule::Cosine),
            _ => {}
        }
        let wrong = || format!("`{text}` is none of constant, linear, cosine, step:EVERY:FACTOR, @FILE");
        let (every, factor) = text.strip_prefix("step:").and_then(|rest| rest.split_once(':')).ok_or_else(wrong)?;
        let every = every.parse().ok().filter(|&e: &u64| e > 0).ok_or_else(wrong)?;
        let factor = factor.parse().ok().filter(|f: &f64| f.is_finite() && *f > 0.0).ok_or_else(wrong)?;
        Ok(Schedule::Step { every, factor })
    }

    /// The rates of a file: one a line. `Err` names the line.
    pub fn rates(text: &str) -> Result<Schedule, String> {
        let rate = |(i, line): (usize, &str)| {
            let rate: Option<f64> = line.trim().parse().ok().filter(|r: &f64| r.is_finite() && *r >= 0.0);
            rate.ok_or_else(|| format!("line {}: `{line}` is not a rate", i + 1))
        };
        text.lines().enumerate().map(rate).collect::<Result<_, _>>().map(Schedule::Rates)
    }
}

impl LearningRate {
    /// `Err` where a number is no rate, a flag has no part in the schedule, or a file has fewer rates than there are steps.
    pub fn check(&self) -> Result<(), String> {
        for (flag, rate) in [("--lr", self.lr), ("--min-lr", self.min_lr)] {
            if !(rate.is_finite() && rate >= 0.0) {
                return Err(format!("{flag} {rate} is not a rate"));
            }
        }
        let LearningRate { lr, min_lr, warmup, steps, .. } = *self;
        match &self.schedule {
            Schedule::Rates(_) if warmup > 0 => Err(no_part("--warmup")),
            Schedule::Rates(_) if min_lr > 0.0 => Err(no_part("--min-lr")),
            Schedule::Rates(rates) if (rates.len() as u64) < steps => {
                Err(format!("--lr-schedule: the file has {} rates for {steps} steps", rates.len()))
            }
            Schedule::Constant | Schedule::Step { .. } if min_lr > 0.0 => {
                Err("--min-lr is what the schedules linear and cosine end at: this one is another".to_owned())
            }
            Schedule::Linear | Schedule::Cosine if min_lr > lr => Err(format!("--min-lr {min_lr} is above --lr {lr}")),
            _ => Ok(()),
        }
    }

    /// The rate of step `t`, counted from 0.
    pub fn at(&self, t: u64) -> f64 {
        if let Schedule::Rates(rates) = &self.schedule {
            return rates.get(t as usize).or(rates.last()).copied().unwrap_or(self.lr);
        }
        if t < self.warmup {
            return self.lr * (t + 1) as f64 / self.warmup as f64;
        }
        let span = self.steps.saturating_sub(self.warmup).max(1);
        let p = (t - self.warmup) as f64 / span as f64;
        let range = self.lr - self.min_lr;
        match self.schedule {
            Schedule::Constant | Schedule::Rates(_) => self.lr,
            Schedule::Linear => self.min_lr + range * (1.0 - p),
            Schedule::Cosine => self.min_lr + range * (1.0 + (std::f64::consts::PI * p).cos()) / 2.0,
            Schedule::Step { every, factor } => self.lr * factor.powf((t / every) as f64),
        }
    }
}

fn no_part(flag: &str) -> String {
    format!("{flag} has no part in --lr-schedule @FILE, which has all rates")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: Schedule, warmup: u64, steps: u64) -> Vec<f64> {
        let lr = LearningRate { lr: 1.0, min_lr: 0.1, schedule, warmup, steps };
        (0..steps).map(|t| lr.at(t)).collect()
    }

    fn check(schedule: &str, warmup: u64, steps: u64, expected: &[f64]) {
        let got = rates(Schedule::parse(schedule).unwrap(), warmup, steps);
        let close = got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-15);
        assert!(close && got.len() == expected.len(), "{schedule}: {got:?} for {expected:?}");
    }

    #[test]
    fn schedules_follow_their_formulas() {
        check("constant", 2, 4, &[0.5, 1.0, 1.0, 1.0]);
        check("linear", 1, 4, &[1.0, 1.0, 0.7, 0.4]);
        check("cosine", 0, 3, &[1.0, 0.775, 0.325]);
        check("step:2:0.5", 0, 5, &[1.0, 1.0, 0.5, 0.5, 0.25]);
        check("linear", 4, 2, &[0.25, 0.5]);
    }

    #[test]
    fn rates_are_numbers_from_zero_on() {
        let check = |lr, min_lr, schedule| LearningRate { lr, min_lr, schedule, warmup: 0, steps: 4 }.check();
        assert_eq!(check(1e-3, 1e-4, Schedule::Cosine), Ok(()));
        assert_eq!(check(f64::NAN, 0.0, Schedule::Constant).unwrap_err(), "--lr NaN is not a rate");
        assert_eq!(check(-1.0, 0.0, Schedule::Constant).unwrap_err(), "--lr -1 is not a rate");
        assert_eq!(check(1.0, f64::INFINITY, Schedule::Linear).unwrap_err(), "--min-lr inf is not a rate");
        assert_eq!(check(1e-3, 1e-2, Schedule::Linear).unwrap_err(), "--min-lr 0.01 is above --lr 0.001");
    }

    #[test]
    fn flags_without_a_part_are_refused() {
        let check = |schedule: &Schedule, warmup, min_lr| {
            LearningRate { lr: 1.0, min_lr, schedule: schedule.clone(), warmup, steps: 4 }.check()
        };
        let file = Schedule::Rates(vec![0.5; 4]);
        for (warmup, min_lr, flag) in [(1, 0.0, "--warmup"), (0, 0.1, "--min-lr")] {
            let text = format!("{flag} has no part in --lr-schedule @FILE, which has all rates");
            assert_eq!(check(&file, warmup, min_lr), Err(text));
        }
        assert_eq!(check(&file, 0, 0.0), Ok(()));
        for schedule in [Schedule::Constant, Schedule::Step { every: 1, factor: 0.5 }] {
            let text = "--min-lr is what the schedules linear and cosine end at: this one is another";
            assert_eq!(check(&schedule, 0, 0.1).unwrap_err(), text);
            assert_eq!(check(&schedule, 4, 0.1).unwrap_err(), text);
            assert_eq!(check(&schedule, 4, 0.0), Ok(()));
        }
        for schedule in [Schedule::Linear, Schedule::Cosine] {
            assert_eq!(check(&schedule, 4, 0.1), Ok(()));
        }
    }

    #[test]
    fn files_are_exact() {
        let schedule = Schedule::rates("0.1\n 2e-3 \n7\n").unwrap();
        assert_eq!(rates(schedule.clone(), 2, 3), [0.1, 2e-3, 7.0]);
        let run = |steps| LearningRate { lr: 1.0, min_lr: 0.0, schedule: schedule.clone(), warmup: 0, steps };
        assert!(run(3).check().is_ok());
        assert_eq!(run(4).check().unwrap_err(), "--lr-schedule: the file has 3 rates for 4 steps");
        assert_eq!(Schedule::rates("1\nx\n").unwrap_err(), "line 2: `x` is not a rate");
        assert_eq!(Schedule::rates("1\n0\n-1\n").unwrap_err(), "line 3: `-1` is not a rate");
    }

    #[test]
    fn wrong_schedules_are_refused() {
        for text in ["", "sine", "step", "step:0:0.5", "step:2:-1", "step:a:1", "constant:1"] {
            assert!(Schedule::parse(text).is_err(), "{text}");
        }
    }
}
