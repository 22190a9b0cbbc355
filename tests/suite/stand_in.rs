//! What stands in for NVIDIA's libraries (`tests/stand_in`), compiled once and kept for later runs, with the kernels that it compiles itself.

use crate::tidy::root;
use std::ffi::OsStr;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The C++ compiler: `CXX`, or g++.
pub fn cxx() -> String {
    std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned())
}

/// The folder of `libcuda.so` and `libnvrtc.so`; what is not installed everywhere is in its folder `more`.
pub struct StandIns(PathBuf);

impl StandIns {
    /// Compiles them where this state of their texts has not been compiled by this compiler yet.
    pub fn get() -> &'static StandIns {
        static BUILT: OnceLock<StandIns> = OnceLock::new();
        BUILT.get_or_init(|| {
            let kept = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("stand_in-{:016x}", state()));
            if !kept.exists() {
                let own = kept.with_extension(std::process::id().to_string());
                build(&own);
                // Another process may have been faster.
                if std::fs::rename(&own, &kept).is_err() {
                    std::fs::remove_dir_all(&own).expect("a folder of this process");
                }
            }
            assert!(kept.join("libcuda.so").exists(), "{} was not made", kept.display());
            StandIns(kept)
        })
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where libraries are looked for, with those that are not installed everywhere.
    pub fn with_more(&self) -> String {
        format!("{}:{}", self.0.display(), self.0.join("more").display())
    }

    /// The command that compiles kernels.
    pub fn compiler(&self, flags: &str) -> String {
        format!("{} {flags} -I{}", cxx(), self.0.display())
    }
}

/// How kernels are compiled where nothing else is said; what they include is compiled once, for these flags alone.
pub const FLAGS: &str = "-O1";

fn build(folder: &Path) {
    let sources = root().join("tests/stand_in");
    std::fs::create_dir_all(folder.join("more")).expect("a folder");
    std::fs::copy(sources.join("device.h"), folder.join("device.h")).expect("a copy");
    let shared = ["-O2", "-shared"];
    for (source, made, flags, libraries) in [
        ("cuda.cpp", "libcuda.so", &shared[..], &["-ldl", "-pthread"][..]),
        ("nvrtc.cpp", "libnvrtc.so", &shared, &[]),
        ("cublaslt.cpp", "more/libcublasLt.so", &shared, &["-ldl"]),
        ("cudnn.cpp", "more/libcudnn.so", &shared, &["-ldl"]),
        ("nccl.cpp", "more/libnccl.so", &shared, &["-ldl", "-pthread"]),
        // Flags as kernels have them, else it would not be taken.
        ("device.h", "device.h.gch", &[FLAGS, "-w", "-x", "c++-header"], &[]),
    ] {
        let mut compiler = Command::new(cxx());
        compiler
            .args(["-std=c++17", "-fPIC", "-o"])
            .arg(folder.join(made))
            .args(flags)
            .arg(sources.join(source))
            .args(libraries);
        let done = compiler.output().unwrap_or_else(|error| panic!("these tests need a C++ compiler, `{}`: {error}", cxx()));
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    }
}

/// A number of the texts and of the compiler.
fn state() -> u64 {
    let mut state = DefaultHasher::new();
    let said = Command::new(cxx()).arg("--version").output();
    let said = said.unwrap_or_else(|error| panic!("these tests need a C++ compiler, `{}`: {error}", cxx()));
    (cxx(), said.stdout, FLAGS).hash(&mut state);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(root().join("tests/stand_in")).expect("a folder").map(|file| file.expect("a file").path()).collect();
    files.sort();
    for file in files {
        (file.file_name().map(OsStr::to_owned), std::fs::read(&file).expect("a text")).hash(&mut state);
    }
    state.finish()
}
