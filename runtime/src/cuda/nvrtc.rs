//! Kernels' texts to machine code.

use super::Arch;
use crate::error::{Error, Result};
use cudarc::nvrtc::{result, sys};
use std::ffi::CString;

/// Machine code for one generation of GPUs.
#[derive(Clone, Debug)]
pub struct Image {
    pub code: Vec<u8>,
    /// What the compiler said: registers, shared memory and spills of each kernel.
    pub log: String,
}

/// What the kernels of an image take of a multiprocessor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Of a thread, the most of any kernel.
    pub registers: u32,
    /// Stored to memory and loaded again for want of registers, of all kernels.
    pub spilled_bytes: u32,
}

impl Usage {
    /// Of both.
    pub fn and(self, other: Usage) -> Usage {
        Usage { registers: self.registers.max(other.registers), spilled_bytes: self.spilled_bytes + other.spilled_bytes }
    }
}

impl Image {
    /// As the assembler reported it.
    pub fn usage(&self) -> Usage {
        let words: Vec<&str> = self.log.split_whitespace().collect();
        let before = |at: usize| words[..at].last().and_then(|n| n.parse::<u32>().ok()).unwrap_or(0);
        let mut usage = Usage::default();
        for (at, window) in words.windows(3).enumerate() {
            match window {
                ["registers" | "registers,", ..] => usage.registers = usage.registers.max(before(at)),
                ["bytes", "spill", _] => usage.spilled_bytes += before(at),
                _ => {}
            }
        }
        usage
    }
}

fn require() -> Result<()> {
    // SAFETY: asks whether the library can be opened; its constructors are NVIDIA's.
    match unsafe { sys::is_culib_present() } {
        true => Ok(()),
        false => {
            Err(Error::device("NVRTC, which compiles kernels for GPUs, is not installed: no libnvrtc.so in the library path"))
        }
    }
}

/// NVRTC's own. Errors: it is not installed.
pub fn version() -> Result<(i32, i32)> {
    require()?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both places live through the call.
    let asked = unsafe { sys::nvrtcVersion(&mut major, &mut minor) };
    asked.result().map_err(|error| Error::device(format!("NVRTC: {error}")))?;
    Ok((major, minor))
}

/// Compiles `text` for `arch`. Errors: NVRTC is not installed, or refuses the text.
pub fn compile(text: &str, arch: Arch) -> Result<Image> {
    require()?;
    let text = CString::new(text).map_err(|_| Error::device("a kernel's text has a NUL"))?;
    let failed = |error: result::NvrtcError| Error::device(format!("NVRTC: {error}"));
    let program = Program(result::create_program(&text, None).map_err(failed)?);
    let options = [format!("--gpu-architecture={}", arch.name()), "--std=c++17".into(), "--ptxas-options=-v".into()];
    // SAFETY: the program is alive.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    let log = program.log();
    compiled.map_err(|error| Error::device(format!("NVRTC: {error}\n{log}")))?;
    let mut size = 0;
    // SAFETY: the program is compiled; the buffer has the size that it says.
    let code = unsafe {
        sys::nvrtcGetCUBINSize(program.0, &mut size).result().map_err(failed)?;
        let mut code = vec![0u8; size];
        sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()).result().map_err(failed)?;
        code
    };
    Ok(Image { code, log })
}

struct Program(sys::nvrtcProgram);

impl Program {
    fn log(&self) -> String {
        // SAFETY: the program is alive.
        let raw = unsafe { result::get_program_log(self.0) }.unwrap_or_default();
        let bytes: Vec<u8> = raw.into_iter().map(|c| c as u8).take_while(|c| *c != 0).collect();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: nothing uses it any more. There is nothing to be done about an error.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}
