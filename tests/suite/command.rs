//! Runs `dcc` and `dcc-run` as a user does: as processes, with a limit on their time, in folders that are gone afterwards.

use std::ffi::OsStr;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Far above what any command of a test takes, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(240);

/// What a command left behind.
#[derive(Clone, Debug)]
pub struct Output {
    /// None where a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Output {
    /// Itself, of a command that must succeed.
    #[track_caller]
    pub fn ok(self) -> Output {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self
    }

    /// What it printed.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}\n{}", self.stdout, self.stderr))
    }
}

/// `dcc WORDS` in the root of the workspace, to its end.
#[track_caller]
pub fn dcc<S: AsRef<OsStr>>(words: impl IntoIterator<Item = S>) -> Output {
    finish(spawn(dcc_command().args(words)))
}

/// `dcc-run WORDS` in the root of the workspace, to its end.
#[track_caller]
pub fn dcc_run<S: AsRef<OsStr>>(words: impl IntoIterator<Item = S>) -> Output {
    finish(spawn(dcc_run_command().args(words)))
}

/// `dcc`, to be given arguments.
pub fn dcc_command() -> Command {
    command(env!("CARGO_BIN_EXE_tested-dcc"))
}

/// `dcc-run`, to be given arguments.
pub fn dcc_run_command() -> Command {
    command(env!("CARGO_BIN_EXE_tested-dcc-run"))
}

fn command(binary: &str) -> Command {
    let mut command = Command::new(binary);
    command.current_dir(crate::tidy::root()).env_remove("RUST_LOG").env_remove("RUST_BACKTRACE").stdin(Stdio::null());
    command
}

/// Starts a command whose output `finish` collects.
#[track_caller]
pub fn spawn(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Waits for a command; one that does not end is killed, and its ranks with it.
#[track_caller]
pub fn finish(mut child: Child) -> Output {
    let stdout = collect(child.stdout.take().expect("piped"));
    let stderr = collect(child.stderr.take().expect("piped"));
    let began = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        if began.elapsed() > LIMIT {
            child.kill().expect("a child");
            panic!("no end after {LIMIT:?}: {}", stderr.join().expect("a reader"));
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text = |reader: JoinHandle<String>| reader.join().expect("a reader");
    Output { code: status.code(), stdout: text(stdout), stderr: text(stderr) }
}

fn collect(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        // What came before an error is what there is to show.
        let _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// A new folder, removed with all that is in it when dropped.
#[derive(Debug)]
pub struct Folder(PathBuf);

impl Folder {
    pub fn new() -> Folder {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("dcc-tests-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Folder(path)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    /// A path in it, as an argument.
    pub fn at(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("UTF-8").to_owned()
    }

    /// The JSON objects of a file with one a line, such as `--metrics-file` writes.
    #[track_caller]
    pub fn lines(&self, name: &str) -> Vec<serde_json::Value> {
        let text = std::fs::read_to_string(self.0.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // A test that fails should say why it does, not that.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn commands_run_and_end() {
    let output = dcc(["--version"]).ok();
    assert!(output.stdout.starts_with("dcc ") && output.stderr.is_empty());
    assert!(dcc_run(["--version"]).ok().stdout.starts_with("dcc-run "));
    let output = dcc(["run"]);
    assert!(output.code == Some(2) && output.stdout.is_empty() && output.stderr.contains("DCC0001"), "{output:?}");
    let folder = Folder::new();
    let path = folder.path().to_owned();
    assert!(path.is_dir());
    drop(folder);
    assert!(!path.exists());
}
