//! A chunk-claiming thread pool: the caller and each worker have a range of the chunks, and take from the ends of others' when their own
//! is done. Ranges are the same shares of every job, so that rows stay in the caches of the core that wrote them.
//!
//! Before: no result depends on where one chunk ends and the next begins, and chunks write disjoint memory; then results do not depend on
//! the number of threads. After: a parallel-for allocates nothing. A worker spins briefly, then parks, so that more ranks than cores work.
//! The pool also owns the packing buffers that matrix products need, one per thread.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

/// Bytes of packing space of each thread.
pub const WORKER_BYTES: usize = 3 << 19;
/// Spins before a thread parks, about 20 µs.
const SPINS: u32 = 2000;

/// Work worth fewer nanoseconds than this is done by the caller alone.
pub const BREAK_EVEN_NS: usize = 5000;

type Body<'a> = dyn Fn(&mut Worker, usize) + Sync + 'a;

/// A thread's private scratch space, handed to each chunk it runs.
pub struct Worker {
    scratch: Buffer,
}

impl Worker {
    /// `WORKER_BYTES` bytes, 64-byte aligned, with whatever the previous chunk left there.
    pub fn scratch(&mut self) -> *mut u8 {
        self.scratch.pointer()
    }
}

/// The threads of one rank.
pub struct Pool {
    team: Mutex<Team>,
    threads: usize,
}

/// Exclusive use of a pool's threads.
struct Team {
    shared: Arc<Shared>,
    caller: Worker,
    threads: Vec<JoinHandle<()>>,
}

/// What the caller publishes: a range for each thread, the caller's first.
struct Shared {
    ranges: Box<[Range]>,
    body: AtomicPtr<*const Body<'static>>,
    chunks: AtomicUsize,
    done: AtomicUsize,
    stop: AtomicBool,
    sleepers: AtomicUsize,
    caller_sleeps: AtomicBool,
    panicked: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
    finished: Condvar,
}

/// A thread's unclaimed chunks, in a cache line of its own: a job's number, the first chunk, the one behind the last. A claim is a
/// compare-and-swap of all three, so that a late thread can never claim a chunk of a job whose fields it has not read.
#[repr(align(64))]
struct Range(AtomicU64);

/// Bits of a chunk's number; the other 24 are the job's.
const CHUNK_BITS: u32 = 20;
const MOST_CHUNKS: usize = (1 << CHUNK_BITS) - 1;
const JOBS: u32 = 1 << (64 - 2 * CHUNK_BITS);

impl Range {
    fn job(&self) -> u32 {
        (self.0.load(Ordering::SeqCst) >> (2 * CHUNK_BITS)) as u32
    }

    fn offer(&self, job: u32, first: usize, end: usize) {
        self.0.store(u64::from(job) << (2 * CHUNK_BITS) | (first as u64) << CHUNK_BITS | end as u64, Ordering::SeqCst);
    }

    /// The owner's end is the first, that of all others the last.
    fn claim(&self, job: u32, owner: bool) -> Option<usize> {
        let mut range = self.0.load(Ordering::Acquire);
        loop {
            let number = |shift: u32| (range >> shift) as usize & MOST_CHUNKS;
            let (first, end) = (number(CHUNK_BITS), number(0));
            if (range >> (2 * CHUNK_BITS)) as u32 != job || first >= end {
                return None;
            }
            let rest = if owner { range + (1 << CHUNK_BITS) } else { range - 1 };
            match self.0.compare_exchange_weak(range, rest, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(if owner { first } else { end - 1 }),
                Err(seen) => range = seen,
            }
        }
    }
}

impl Pool {
    /// A pool of `threads` threads, the caller included; 1 starts none.
    pub fn new(threads: usize) -> Pool {
        Pool::start(threads).expect("the system starts compute threads")
    }

    /// As `new`. Errors: the system starts no more threads; those that it did start end.
    pub fn start(threads: usize) -> std::io::Result<Pool> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared::new(threads));
        let mut team = Team { shared, caller: Worker { scratch: Buffer::new(WORKER_BYTES) }, threads: Vec::new() };
        for index in 1..threads {
            team.threads.push(spawn(index, Arc::clone(&team.shared))?);
        }
        Ok(Pool { team: Mutex::new(team), threads })
    }

    /// More threads than this are a mistake: each has a stack, and packing space.
    pub fn most() -> usize {
        64 * std::thread::available_parallelism().map_or(1, |cores| cores.get())
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Bytes that the pool holds for packing, all threads together.
    pub fn scratch_bytes(&self) -> usize {
        self.threads * WORKER_BYTES
    }

    /// The threads, until the guard is dropped. A second caller waits.
    fn team(&self) -> MutexGuard<'_, Team> {
        self.team.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Runs `body` for every chunk below `chunks`, on all threads if `nanoseconds` of work are worth it.
    pub fn run(&self, chunks: usize, nanoseconds: usize, body: &(dyn Fn(&mut Worker, usize) + Sync)) {
        self.team().run(chunks, nanoseconds, body);
    }
}

impl Team {
    /// Runs `body` for every chunk below `chunks` and returns when all are done. `body` must not use the pool.
    pub fn run(&mut self, chunks: usize, nanoseconds: usize, body: &Body<'_>) {
        if self.threads.is_empty() || chunks <= 1 || nanoseconds < BREAK_EVEN_NS {
            (0..chunks).for_each(|chunk| body(&mut self.caller, chunk));
            return;
        }
        // Beyond what a range can tell, several are claimed at once.
        let grain = chunks.div_ceil(MOST_CHUNKS);
        let grains = |worker: &mut Worker, claimed: usize| {
            (claimed * grain..((claimed + 1) * grain).min(chunks)).for_each(|chunk| body(worker, chunk));
        };
        let (body, chunks): (&Body<'_>, usize) = if grain == 1 { (body, chunks) } else { (&grains, chunks.div_ceil(grain)) };
        let mut erased: *const Body<'static> =
            // SAFETY: only the lifetime changes; `run` outlives every use, since it returns after the last chunk is done.
            unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(std::ptr::from_ref(body)) };
        let job = self.shared.publish(&mut erased, chunks);
        while let Some(chunk) = self.shared.claim(job, 0) {
            self.shared.execute(&mut self.caller, erased, chunk);
        }
        self.shared.wait_for_all(chunks);
        assert!(!self.shared.panicked.swap(false, Ordering::Relaxed), "a chunk panicked");
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock());
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn new(threads: usize) -> Shared {
        Shared {
            ranges: (0..threads).map(|_| Range(AtomicU64::new(0))).collect(),
            body: AtomicPtr::new(std::ptr::null_mut()),
            chunks: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            finished: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The fields of the previous job are free to change: all its chunks were claimed and done, and a claim needs its number.
    fn publish(&self, body: *mut *const Body<'static>, chunks: usize) -> u32 {
        let job = (self.ranges[0].job() + 1) % JOBS;
        self.body.store(body, Ordering::Release);
        self.chunks.store(chunks, Ordering::Release);
        self.done.store(0, Ordering::Relaxed);
        let threads = self.ranges.len();
        for (thread, range) in self.ranges.iter().enumerate().rev() {
            range.offer(job, thread * chunks / threads, (thread + 1) * chunks / threads);
        }
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.lock());
            self.wake.notify_all();
        }
        job
    }

    /// The next chunk of the thread's own range, else the last of another's.
    fn claim(&self, job: u32, thread: usize) -> Option<usize> {
        let threads = self.ranges.len();
        (0..threads).find_map(|step| self.ranges[(thread + step) % threads].claim(job, step == 0))
    }

    fn execute(&self, worker: &mut Worker, body: *const Body<'static>, chunk: usize) {
        // SAFETY: the chunk was claimed under its job's number, so the caller of `run` is still waiting and `body` lives.
        let body = unsafe { &*body };
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| body(worker, chunk)));
        if outcome.is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
        let chunks = self.chunks.load(Ordering::Relaxed);
        if self.done.fetch_add(1, Ordering::SeqCst) + 1 == chunks && self.caller_sleeps.load(Ordering::SeqCst) {
            drop(self.lock());
            self.finished.notify_one();
        }
    }

    fn wait_for_all(&self, chunks: usize) {
        for _ in 0..SPINS {
            if self.done.load(Ordering::Acquire) == chunks {
                return;
            }
            std::hint::spin_loop();
        }
        self.caller_sleeps.store(true, Ordering::SeqCst);
        let mut guard = self.lock();
        while self.done.load(Ordering::SeqCst) != chunks {
            guard = self.finished.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        self.caller_sleeps.store(false, Ordering::SeqCst);
    }

    /// Waits for a job other than `last`; none when the pool stops.
    fn next_job(&self, thread: usize, last: u32) -> Option<u32> {
        let fresh = || {
            let job = self.ranges[thread].job();
            (job != last).then_some(job)
        };
        for _ in 0..SPINS {
            if let Some(job) = fresh() {
                return Some(job);
            }
            std::hint::spin_loop();
        }
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock();
        let job = loop {
            if self.stop.load(Ordering::SeqCst) {
                break None;
            }
            if let Some(job) = fresh() {
                break Some(job);
            }
            guard = self.wake.wait(guard).unwrap_or_else(|poisoned| poisoned.into_inner());
        };
        drop(guard);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        job
    }
}

fn spawn(index: usize, shared: Arc<Shared>) -> std::io::Result<JoinHandle<()>> {
    let work = move || {
        let mut worker = Worker { scratch: Buffer::new(WORKER_BYTES) };
        let mut last = 0;
        while let Some(job) = shared.next_job(index, last) {
            last = job;
            let body = shared.body.load(Ordering::Relaxed);
            while let Some(chunk) = shared.claim(job, index) {
                // SAFETY: the claim succeeded under `job`, so the caller waits for this chunk: its `erased` local is alive, and
                // `body` is that job's, since publishing another one needs this chunk to be done.
                let body = unsafe { *body };
                shared.execute(&mut worker, body, chunk);
            }
        }
    };
    std::thread::Builder::new().name(format!("compute-{index}")).spawn(work)
}

/// Bytes with 64-byte alignment, zeros at first: lanes behind the last element are read, whatever they are.
/// Pages that nothing was written to are no memory.
struct Buffer(Box<[MaybeUninit<Line>]>);

#[repr(align(64))]
struct Line(#[allow(dead_code)] [u8; 64]);

impl Buffer {
    fn new(bytes: usize) -> Buffer {
        Buffer(Box::new_zeroed_slice(bytes / 64))
    }

    fn pointer(&mut self) -> *mut u8 {
        self.0.as_mut_ptr().cast()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            for round in 0..300 {
                let chunks = 1 + (round * 7) % 97;
                let counts: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                pool.run(chunks, usize::MAX, &|_, chunk| {
                    counts[chunk].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn a_parked_pool_wakes() {
        let pool = Pool::new(2);
        for _ in 0..5 {
            std::thread::sleep(std::time::Duration::from_millis(2));
            let sum = AtomicUsize::new(0);
            pool.run(64, usize::MAX, &|_, chunk| {
                sum.fetch_add(chunk, Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 64 * 63 / 2);
        }
    }

    #[test]
    fn a_panic_in_a_chunk_reaches_the_caller() {
        let pool = Pool::new(2);
        let run = |bad: usize| {
            let pool = &pool;
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
                pool.run(8, usize::MAX, &|_, chunk| assert_ne!(chunk, bad))
            }))
        };
        assert!(run(3).is_err());
        assert!(run(9).is_ok());
    }
}
