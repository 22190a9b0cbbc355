//! Kernels' texts to machine code.

use super::Target;
use crate::error::{Error, Result};
use cudarc::nvrtc::{result, sys};
use std::ffi::CString;

/// Machine code for one generation of GPUs, or PTX.
#[derive(Clone, Debug)]
pub struct Image {
    pub code: Vec<u8>,
    /// What the compiler said: registers, shared memory and spills of each kernel.
    pub log: String,
}

/// What kernels take of a multiprocessor.
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
    /// Each entry and what it takes, as the assembler reported it.
    pub fn entries(&self) -> Vec<(&str, Usage)> {
        let begun = self.log.split("Compiling entry function '").skip(1);
        begun.filter_map(|log| log.split_once('\'')).map(|(name, log)| (name, usage(log))).collect()
    }
}

/// What a log says of one entry.
fn usage(log: &str) -> Usage {
    let words: Vec<&str> = log.split_whitespace().collect();
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

/// Whether it is installed.
pub fn is_there() -> bool {
    // SAFETY: asks whether the library can be opened; its constructors are NVIDIA's.
    unsafe { sys::is_culib_present() }
}

fn require() -> Result<()> {
    match is_there() {
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

/// Compiles `text` for `target`. Errors: NVRTC is not installed, or refuses the text.
pub fn compile(text: &str, target: Target) -> Result<Image> {
    require()?;
    let text = CString::new(text).map_err(|_| Error::device("a kernel's text has a NUL"))?;
    let failed = |error: result::NvrtcError| Error::device(format!("NVRTC: {error}"));
    let program = Program(result::create_program(&text, None).map_err(failed)?);
    let mut options = vec![format!("--gpu-architecture={}", target.name()), "--std=c++17".to_owned()];
    if let Target::Code(_) = target {
        options.push("--ptxas-options=-v".to_owned());
    }
    // SAFETY: the program is alive.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    let log = program.log();
    compiled.map_err(|error| Error::device(format!("NVRTC: {error}\n{log}")))?;
    let mut size = 0;
    // SAFETY: the program is compiled; the buffer has the size that it says.
    let code = unsafe {
        match target {
            Target::Code(_) => sys::nvrtcGetCUBINSize(program.0, &mut size),
            Target::Ptx(_) => sys::nvrtcGetPTXSize(program.0, &mut size),
        }
        .result()
        .map_err(failed)?;
        let mut code = vec![0u8; size];
        match target {
            Target::Code(_) => sys::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()),
            Target::Ptx(_) => sys::nvrtcGetPTX(program.0, code.as_mut_ptr().cast()),
        }
        .result()
        .map_err(failed)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What NVRTC 13 says behind its warnings.
    const LOG: &str = "k(230): warning #177-D: variable \"i0v\" was declared but never referenced

ptxas info    : 833 bytes gmem
ptxas info    : Compiling entry function 'kernel1_parts' for 'sm_90a'
ptxas info    : Function properties for kernel1_parts
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 56 registers, used 1 barriers, 256 bytes smem
ptxas info    : Compile time = 4.437 ms
ptxas info    : Compiling entry function 'kernel0' for 'sm_90a'
ptxas info    : Function properties for kernel0
ptxas         .     896 bytes stack frame, 1360 bytes spill stores, 1712 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 896 bytes cumulative stack size
";

    #[test]
    fn what_each_entry_takes() {
        let image = Image { code: Vec::new(), log: LOG.to_owned() };
        let usage = |registers, spilled_bytes| Usage { registers, spilled_bytes };
        assert_eq!(image.entries(), [("kernel1_parts", usage(56, 0)), ("kernel0", usage(255, 3072))]);
        let all = image.entries().iter().fold(Usage::default(), |all, (_, own)| all.and(*own));
        assert_eq!(all, usage(255, 3072));
    }
}
