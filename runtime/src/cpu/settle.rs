//! Memory that only preparing needs, given back to the system.

#[cfg(target_os = "linux")]
use std::os::unix::ffi::OsStrExt;

/// Gives back what was allocated and freed, and the pages of this program's code and constants: those of compilers that have done their work stay
/// away, others come back from the file when they are next used. Costs time only.
pub fn settle() {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: free memory is nobody's.
        #[cfg(target_env = "gnu")]
        unsafe {
            libc::malloc_trim(0)
        };
        // Where the system does not say what there is, it keeps it.
        let Ok(program) = std::fs::read_link("/proc/self/exe") else { return };
        for mapping in crate::metrics::memory::mappings().unwrap_or_default() {
            // Libraries may be loaded and relocated meanwhile, the program was before it began. Without a page that was written (by
            // relocations, by a debugger's breakpoints), all is as the file has it.
            let is_program = mapping.path.as_bytes() == program.as_os_str().as_bytes();
            if is_program && matches!(&mapping.permissions[..], "r--p" | "r-xp") && mapping.anonymous == 0 {
                // SAFETY: a private mapping that cannot be written, and was not: what is dropped is read again from the file. Threads may run in it.
                unsafe { libc::madvise(mapping.addresses.start as *mut _, mapping.addresses.len(), libc::MADV_DONTNEED) };
            }
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::metrics::memory::{Mapping, mappings};

    #[test]
    fn code_leaves_memory_and_comes_back() {
        let code = settle as fn() as usize;
        let here = || mappings().unwrap().into_iter().find(|mapping| mapping.addresses.contains(&code)).unwrap();
        // SAFETY: a readable mapping of this program.
        let touch = |mapping: &Mapping| {
            mapping
                .addresses
                .clone()
                .step_by(4096)
                .map(|page| u64::from(unsafe { (page as *const u8).read_volatile() }))
                .sum::<u64>()
        };
        let sum = touch(&here());
        let before = here().resident;
        settle();
        let after = here().resident;
        assert!(after < before / 2, "{before} bytes of code before, {after} after");
        assert!(touch(&here()) == sum && here().resident >= before, "all of it is there again");
    }
}
