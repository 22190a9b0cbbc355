//! The driver's calls that dcc uses, as safe as they can be made: every result is looked at, every copy is inside of its buffer.

use super::queue::Stream;
use super::shipped::Shipped;
use super::{Arch, Image};
use crate::error::{Error, Result};
use cudarc::driver::sys;
use smallvec::SmallVec;
use std::ffi::{CStr, CString, c_void};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// One GPU and a stream of work on it. Work runs in the order of the calls.
pub struct Gpu {
    name: String,
    arch: Arch,
    ordinal: u32,
    shipped: Shipped,
    stream: Stream,
}

/// Memory of a GPU.
pub struct Buffer {
    at: sys::CUdeviceptr,
    bytes: usize,
}

/// Memory of the host that a GPU copies from by itself, taken from the front until all copies are done.
pub struct Pinned {
    at: *mut u8,
    bytes: usize,
    used: usize,
}

/// A loaded kernel.
pub struct Kernel {
    function: sys::CUfunction,
    _module: Arc<Module>,
}

struct Module(sys::CUmodule);

// SAFETY: the driver's handles are numbers of a process, which any of its threads may use.
unsafe impl Send for Kernel {}
// SAFETY: launches only read it.
unsafe impl Sync for Kernel {}
// SAFETY: as above.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

/// Set once a GPU of this process stands still: whatever would free something of it waits for it for ever.
static STANDS_STILL: AtomicBool = AtomicBool::new(false);

/// From here on nothing of any GPU is freed: the process is about to end.
pub(super) fn abandon() {
    STANDS_STILL.store(true, Ordering::SeqCst);
}

/// Whether nothing of any GPU is freed any more.
pub(super) fn is_abandoned() -> bool {
    STANDS_STILL.load(Ordering::SeqCst)
}

/// Ends the process where a GPU stands still: at the usual end its libraries would wait for it.
pub fn end_if_abandoned(code: i32) {
    if is_abandoned() {
        end(code);
    }
}

/// Ends the process at once, whatever other threads have called: nothing of libraries runs.
pub fn end(code: i32) -> ! {
    let _ = std::io::stdout().flush();
    // SAFETY: it never returns.
    unsafe { libc::_exit(code) }
}

/// Frees by `free`, unless a GPU stands still. There is nothing to be done about an error.
pub(super) fn release(free: impl FnOnce() -> sys::CUresult) {
    if !is_abandoned() {
        let _ = free();
    }
}

pub(super) fn check(result: sys::CUresult, what: &str) -> Result<()> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the driver answered before, so it is there; it gives a text of its own or nothing.
    let name = unsafe {
        let found = sys::cuGetErrorName(result, &mut name) == sys::CUresult::CUDA_SUCCESS && !name.is_null();
        if found { CStr::from_ptr(name).to_string_lossy().into_owned() } else { format!("{result:?}") }
    };
    Err(Error::device(format!("{what}: {name}")))
}

fn require_driver() -> Result<()> {
    // SAFETY: asks whether the library can be opened; its constructors are NVIDIA's.
    match unsafe { sys::is_culib_present() } {
        true => Ok(()),
        false => Err(Error::device("no NVIDIA driver is installed: no libcuda.so in the library path")),
    }
}

impl Gpu {
    /// Opens GPU `ordinal` of this machine, for this thread; `shipped`: machine code that it may load. Errors: no driver, no such GPU, one older than compute capability 8.0.
    pub fn open(ordinal: u32, shipped: Shipped) -> Result<Gpu> {
        require_driver()?;
        let mut device = 0;
        let mut context = std::ptr::null_mut();
        let mut name = [0; 128];
        let mut capability = [0; 2];
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        };
        let attributes = [CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR];
        // SAFETY: every pointer is to a place of its type that lives through the call.
        unsafe {
            check(sys::cuInit(0), "the NVIDIA driver does not start")?;
            check(sys::cuDeviceGet(&mut device, ordinal as i32), &format!("there is no GPU {ordinal}"))?;
            check(sys::cuDeviceGetName(name.as_mut_ptr(), name.len() as i32, device), "a GPU's name")?;
            for (value, attribute) in capability.iter_mut().zip(attributes) {
                check(sys::cuDeviceGetAttribute(value, attribute, device), "a GPU's compute capability")?;
            }
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device), &format!("GPU {ordinal} gives no context"))?;
            check(sys::cuCtxSetCurrent(context), "a GPU's context")?;
        }
        // SAFETY: the driver ended the name with a NUL.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        let arch = Arch { major: capability[0] as u32, minor: capability[1] as u32 };
        if arch.major < 8 {
            return Err(Error::device(format!("{name} has compute capability {}.{}, dcc needs 8.0", arch.major, arch.minor)));
        }
        Ok(Gpu { name, arch, ordinal, shipped, stream: Stream::new()? })
    }

    /// GPUs of this machine. Errors: no driver.
    pub fn count() -> Result<u32> {
        require_driver()?;
        let mut count = 0;
        // SAFETY: the place lives through the call.
        unsafe {
            check(sys::cuInit(0), "the NVIDIA driver does not start")?;
            check(sys::cuDeviceGetCount(&mut count), "the number of GPUs")?;
        }
        Ok(count as u32)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn arch(&self) -> Arch {
        self.arch
    }

    pub fn shipped(&self) -> &Shipped {
        &self.shipped
    }

    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Where kernels, and copies from and to the host, run.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Lets kernels of this GPU use the memory of GPU `other`; whether it can be had.
    pub fn reach(&self, other: u32) -> Result<bool> {
        if other == self.ordinal {
            return Ok(true);
        }
        let mut can = 0;
        let mut context = std::ptr::null_mut();
        // SAFETY: the places live through the calls; both GPUs were opened, so that both contexts are there.
        unsafe {
            check(sys::cuDeviceCanAccessPeer(&mut can, self.ordinal as i32, other as i32), "whether GPUs reach each other")?;
            if can == 0 {
                return Ok(false);
            }
            check(sys::cuDevicePrimaryCtxRetain(&mut context, other as i32), &format!("GPU {other} gives no context"))?;
            match sys::cuCtxEnablePeerAccess(context, 0) {
                sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(true),
                result => check(result, &format!("access to GPU {other}")).map(|()| true),
            }
        }
    }

    /// Memory with unspecified contents. Errors: there is not so much.
    pub fn allocate(&self, bytes: usize) -> Result<Buffer> {
        let mut at = 0;
        // SAFETY: the place lives through the call.
        check(unsafe { sys::cuMemAlloc_v2(&mut at, bytes.max(1)) }, &format!("{bytes} bytes of {}", self.name))?;
        Ok(Buffer { at, bytes })
    }

    /// Copies `from` to byte `at` of `to`, behind all work so far.
    pub fn write(&self, to: &Buffer, at: usize, from: &[u8]) -> Result<()> {
        assert!(at + from.len() <= to.bytes, "{} bytes at {at} of {}", from.len(), to.bytes);
        // On the stream: a copy on no stream may end after it returns, and no kernel of ours would wait for it.
        // SAFETY: both are as long as that, and `from` lives until the copy is done.
        let copied =
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.at + at as u64, from.as_ptr().cast(), from.len(), self.stream.raw()) };
        check(copied, "a copy to the GPU")?;
        self.wait()
    }

    /// Memory of the host that the GPU copies from and to by itself. Errors: there is not so much.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let mut at = std::ptr::null_mut();
        // SAFETY: the place lives through the call.
        check(unsafe { sys::cuMemHostAlloc(&mut at, bytes.max(1), 0) }, &format!("{bytes} bytes of pinned memory"))?;
        Ok(Pinned { at: at.cast(), bytes, used: 0 })
    }

    /// Copies `from` to byte `at` of `to`, behind all work so far, and returns at once where `through` has room; what it has no room for goes
    /// in parts.
    pub fn send(&self, to: &Buffer, at: usize, from: &[u8], through: &mut Pinned) -> Result<()> {
        let half = (through.bytes / 2).max(1);
        if from.len() > half {
            let mut parts = from.chunks(half).enumerate();
            return parts.try_for_each(|(n, part)| self.send(to, at + n * half, part, through));
        }
        assert!(at + from.len() <= to.bytes, "{} bytes at {at} of {}", from.len(), to.bytes);
        if through.used + from.len() > through.bytes {
            self.wait()?;
            through.used = 0;
        }
        // SAFETY: there is as much room; no copy still reads it, because `used` grows until all copies are done.
        let copied = unsafe {
            let place = through.at.add(through.used);
            std::ptr::copy_nonoverlapping(from.as_ptr(), place, from.len());
            sys::cuMemcpyHtoDAsync_v2(to.at + at as u64, place.cast(), from.len(), self.stream.raw())
        };
        through.used += from.len().next_multiple_of(64);
        check(copied, "a copy to the GPU")
    }

    /// Copies what is at byte `at` of `from` to `to`, behind all work so far.
    pub fn read(&self, from: &Buffer, at: usize, to: &mut [u8]) -> Result<()> {
        assert!(at + to.len() <= from.bytes, "{} bytes at {at} of {}", to.len(), from.bytes);
        // SAFETY: both are as long as that, and `to` lives until the copy is done.
        let copied =
            unsafe { sys::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from.at + at as u64, to.len(), self.stream.raw()) };
        check(copied, "a copy from the GPU")?;
        self.wait()
    }

    /// The kernels of those names. Errors: code for another GPU, or without such a kernel.
    pub fn load(&self, image: &Image, names: &[&str]) -> Result<Vec<Kernel>> {
        let mut module = std::ptr::null_mut();
        // SAFETY: the driver reads an image's length from the image, which a compiler made.
        check(unsafe { sys::cuModuleLoadData(&mut module, image.code.as_ptr().cast()) }, "code that the GPU does not take")?;
        let module = Arc::new(Module(module));
        let kernel = |name: &&str| {
            let mut function = std::ptr::null_mut();
            let text = CString::new(*name).map_err(|_| Error::device("a kernel's name has a NUL"))?;
            // SAFETY: the module is loaded, the name ends with a NUL.
            check(unsafe { sys::cuModuleGetFunction(&mut function, module.0, text.as_ptr()) }, &format!("no kernel `{name}`"))?;
            Ok(Kernel { function, _module: Arc::clone(&module) })
        };
        names.iter().map(kernel).collect()
    }

    /// Lets launches of `kernel` have that many bytes of dynamic shared memory. Errors: more than the GPU has for a block.
    pub fn allow_shared(&self, kernel: &Kernel, bytes: u32) -> Result<()> {
        use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST;
        // SAFETY: the kernel is loaded.
        let allowed = unsafe { sys::cuFuncSetAttribute(kernel.function, MOST, bytes as i32) };
        check(allowed, &format!("{} has no {bytes} bytes of shared memory for a block", self.name))
    }

    /// Until all work is done. Errors: of any of it; no step of it was done for longer than the stream's limit.
    pub fn wait(&self) -> Result<()> {
        self.stream.wait()
    }
}

impl Kernel {
    /// Starts it on a stream of its GPU.
    ///
    /// # Safety
    /// `words` are the kernel's arguments, 8 bytes each, in its order; what they point to is alive until the work is done, and as large
    /// as the kernel uses it.
    pub unsafe fn launch(&self, stream: &Stream, shape: ([u32; 2], u32, u32), words: &mut [u64]) -> Result<()> {
        let mut places: SmallVec<[*mut c_void; 32]> = words.iter_mut().map(|word| std::ptr::from_mut(word).cast()).collect();
        // SAFETY: the caller's.
        unsafe { self.start(stream, shape, &mut places) }
    }

    /// As `launch`, of a kernel whose one argument is all of `table`.
    ///
    /// # Safety
    /// As `launch`; the argument is as long as `table`.
    pub unsafe fn launch_table(&self, stream: &Stream, shape: ([u32; 2], u32, u32), table: &mut [u64]) -> Result<()> {
        // SAFETY: the caller's.
        unsafe { self.start(stream, shape, &mut [table.as_mut_ptr().cast()]) }
    }

    unsafe fn start(
        &self,
        stream: &Stream,
        ([x, y], threads, shared): ([u32; 2], u32, u32),
        places: &mut [*mut c_void],
    ) -> Result<()> {
        // SAFETY: the caller's; the driver copies the arguments before it returns.
        let launched = unsafe {
            let arguments = places.as_mut_ptr();
            let none = std::ptr::null_mut();
            sys::cuLaunchKernel(self.function, x, y, 1, threads, 1, 1, shared, stream.raw(), arguments, none)
        };
        check(launched, "a kernel does not start")
    }
}

impl Buffer {
    /// Its address on the GPU.
    pub fn address(&self) -> u64 {
        self.at
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: it was allocated and nothing has its address but kernels, which their caller keeps it alive for.
        release(|| unsafe { sys::cuMemFree_v2(self.at) });
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: it was allocated by the driver, which waits for copies from it.
        release(|| unsafe { sys::cuMemFreeHost(self.at.cast()) });
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: no kernel of it is left.
        release(|| unsafe { sys::cuModuleUnload(self.0) });
    }
}
