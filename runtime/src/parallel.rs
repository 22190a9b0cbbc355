//! Work on several things at once, whose results do not depend on how many threads there are.

use std::num::NonZero;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// `make` of each item, in their order, on as many threads as there are processors and at most `most`. All are made even where one fails.
/// Errors: the first item's that has one.
pub fn side_by_side<T: Sync, R: Send + Sync, E: Send + Sync>(
    items: &[T],
    most: usize,
    make: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let threads = threads(most).min(items.len());
    let (next, done) = (AtomicUsize::new(0), items.iter().map(|_| OnceLock::new()).collect::<Vec<_>>());
    std::thread::scope(|scope| {
        let work = || {
            while let Some((item, done)) =
                Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|n| Some((items.get(n)?, done.get(n)?)))
            {
                let _ = done.set(make(item));
            }
        };
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
    });
    done.into_iter().map(|result| result.into_inner().expect("every item was made")).collect()
}

/// As many threads as there are processors, at most `most`.
pub fn threads(most: usize) -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_and_errors_come_in_the_order_of_items() {
        let items: Vec<u32> = (0..100).collect();
        // Later items are done sooner.
        let late = |n: u32| std::thread::sleep(std::time::Duration::from_micros(u64::from(100 - n) * 20));
        for most in [1, 3, 100] {
            let double = |&n: &u32| -> Result<u32, u32> {
                late(n);
                Ok(2 * n)
            };
            assert_eq!(side_by_side(&items, most, double), Ok(items.iter().map(|n| 2 * n).collect()));
            let odd = |&n: &u32| {
                late(n);
                if n > 6 && n % 2 == 1 { Err(n) } else { Ok(n) }
            };
            assert_eq!(side_by_side(&items, most, odd), Err(7));
        }
        assert_eq!(side_by_side(&[], 8, |&n: &u32| Err::<u32, u32>(n)), Ok(Vec::new()));
    }
}
