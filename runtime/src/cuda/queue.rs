//! Streams of work, the events by which one comes behind another, and graphs: work that was recorded once.

use super::driver::{abandon, check, release};
use crate::comm::Label;
use crate::error::{Error, Result};
use cudarc::driver::sys;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Work that a GPU does in the order of the calls, which return at once.
pub struct Stream {
    raw: sys::CUstream,
    watch: Mutex<Watch>,
}

/// Where a stream's work has come to, so that one which stands still can be named.
struct Watch {
    /// The last work that was started, oldest first, and the event behind it.
    recent: VecDeque<(Label, Event)>,
    limit: Duration,
}

/// A place in a stream.
pub struct Event(sys::CUevent);

/// Recorded work.
pub struct Graph(sys::CUgraphExec);

// SAFETY: the driver's handles are numbers of a process, which any of its threads may use.
unsafe impl Send for Stream {}
// SAFETY: the driver's own calls on a stream may come from several threads at once.
unsafe impl Sync for Stream {}
// SAFETY: as above.
unsafe impl Send for Event {}
// SAFETY: the driver's own calls on an event may come from several threads at once.
unsafe impl Sync for Event {}
// SAFETY: as above.
unsafe impl Send for Graph {}

/// Names of works that are kept.
const RECENT: usize = 64;
/// From one look at a stream to the next, once it takes longer.
const LOOK: Duration = Duration::from_micros(50);
/// Looks without a pause.
const LOOKS: u32 = 2000;
const LIMIT: Duration = Duration::from_secs(60);

fn ready(result: sys::CUresult) -> Result<bool> {
    match result {
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        result => check(result, "work on the GPU failed").map(|()| true),
    }
}

impl Stream {
    /// Of the thread's GPU.
    pub fn new() -> Result<Stream> {
        Stream::of(|raw| {
            // SAFETY: the place lives through the call.
            unsafe { sys::cuStreamCreate(raw, sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32) }
        })
    }

    /// One whose work comes before that of others where both are ready.
    pub fn urgent() -> Result<Stream> {
        let (mut least, mut most) = (0, 0);
        // SAFETY: the places live through the call.
        check(unsafe { sys::cuCtxGetStreamPriorityRange(&mut least, &mut most) }, "a GPU's priorities")?;
        Stream::of(|raw| {
            let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
            // SAFETY: the place lives through the call.
            unsafe { sys::cuStreamCreateWithPriority(raw, flags, most) }
        })
    }

    fn of(create: impl FnOnce(*mut sys::CUstream) -> sys::CUresult) -> Result<Stream> {
        let mut raw = std::ptr::null_mut();
        check(create(&mut raw), "a stream")?;
        Ok(Stream { raw, watch: Mutex::new(Watch { recent: VecDeque::new(), limit: LIMIT }) })
    }

    fn watch(&self) -> MutexGuard<'_, Watch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// How long `wait` sees nothing done before it gives up; a minute where nothing is said.
    pub fn set_limit(&self, limit: Duration) {
        self.watch().limit = limit;
    }

    /// The event comes behind all work so far.
    pub fn record(&self, event: &Event) -> Result<()> {
        // SAFETY: both live through the call.
        check(unsafe { sys::cuEventRecord(event.0, self.raw) }, "an event")
    }

    /// All work from here on comes behind the event, as it was last recorded.
    pub fn follow(&self, event: &Event) -> Result<()> {
        // SAFETY: both live through the call; the driver keeps what it needs of the event.
        check(unsafe { sys::cuStreamWaitEvent(self.raw, event.0, 0) }, "a wait for an event")
    }

    /// Names the work so far, for `wait`.
    pub fn name(&self, label: &Label) -> Result<()> {
        let mut watch = self.watch();
        let recent = &mut watch.recent;
        let event = match recent.len() < RECENT {
            true => Event::new()?,
            false => recent.pop_front().map_or_else(Event::new, |(_, event)| Ok(event))?,
        };
        self.record(&event)?;
        recent.push_back((*label, event));
        Ok(())
    }

    /// Until all work is done. Errors: of any of it; nothing more was done for the limit, with the name of what stands still:
    /// then nothing is freed any more.
    pub fn wait(&self) -> Result<()> {
        let mut looks = 0;
        let (mut since, mut done) = (Instant::now(), None);
        // SAFETY: the stream lives as long as `self`.
        while !ready(unsafe { sys::cuStreamQuery(self.raw) })? {
            looks += 1;
            if looks < LOOKS {
                std::thread::yield_now();
                continue;
            }
            std::thread::sleep(LOOK);
            // Now and then: is it slow, or does it stand still?
            if looks % 2000 == 0 {
                let watch = self.watch();
                let (count, stuck) = watch.passed()?;
                if done.replace(count) != Some(count) {
                    since = Instant::now();
                } else if since.elapsed() > watch.limit {
                    abandon();
                    return Err(watch.stands_still(stuck));
                }
            }
        }
        Ok(())
    }

    /// What is started from here on is recorded instead of done. A library may load its code meanwhile, which stricter modes refuse.
    pub fn begin_graph(&self) -> Result<()> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as `self`.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.raw, mode) }, "a graph")
    }

    /// What was started since `begin_graph`.
    pub fn end_graph(&self) -> Result<Graph> {
        let mut graph = std::ptr::null_mut();
        let mut made = std::ptr::null_mut();
        // SAFETY: the places live through the calls; the graph is not used after it was instantiated.
        unsafe {
            check(sys::cuStreamEndCapture(self.raw, &mut graph), "a graph")?;
            let instantiated = sys::cuGraphInstantiateWithFlags(&mut made, graph, 0);
            let _ = sys::cuGraphDestroy(graph);
            check(instantiated, "a graph")?;
        }
        Ok(Graph(made))
    }

    /// Starts what was recorded.
    ///
    /// # Safety
    /// All that its kernels use is alive until the work is done.
    pub unsafe fn run(&self, graph: &Graph) -> Result<()> {
        // SAFETY: both live through the call; the rest is the caller's.
        check(unsafe { sys::cuGraphLaunch(graph.0, self.raw) }, "a graph does not start")
    }
}

impl Watch {
    /// How many of the named works are done, and the first that is not.
    fn passed(&self) -> Result<(usize, Option<Label>)> {
        for (count, (label, event)) in self.recent.iter().enumerate() {
            if !event.has_passed()? {
                return Ok((count, Some(*label)));
            }
        }
        Ok((self.recent.len(), None))
    }

    fn stands_still(&self, stuck: Option<Label>) -> Error {
        let seconds = self.limit.as_secs_f64();
        let error = Error::hang(format!("the GPU has done nothing for {seconds:.1} s"));
        let error = stuck.map_or(error.clone(), |label| error.at(label.text()));
        error.help("if a kernel may take that long, raise --timeout")
    }
}

impl Event {
    pub fn new() -> Result<Event> {
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the place lives through the call.
        check(unsafe { sys::cuEventCreate(&mut raw, flags) }, "an event")?;
        Ok(Event(raw))
    }

    fn has_passed(&self) -> Result<bool> {
        // SAFETY: the event lives as long as `self`.
        ready(unsafe { sys::cuEventQuery(self.0) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is this value's own; the driver ends its work first.
        release(|| unsafe { sys::cuStreamDestroy_v2(self.raw) });
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is this value's own; the driver keeps what waits still need.
        release(|| unsafe { sys::cuEventDestroy_v2(self.0) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is this value's own; the driver keeps what still runs.
        release(|| unsafe { sys::cuGraphExecDestroy(self.0) });
    }
}
