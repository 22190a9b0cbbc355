//! The page of each of the runtime's error codes: what `dcc explain CODE` prints, beside the compiler's own.

/// Code, title, what it means and what to do; in the order of their codes.
pub const PAGES: &[(u16, &str, &str)] = &[
    (
        50,
        "unknown kind of data",
        "--data reads .npz, .npy, .safetensors, folders of NAME.npy, and token files (.bin of nanoGPT or llm.c, or a 1-D \
         integer .npy). Files are told apart by their first bytes. Arrays must be little-endian and in C order.",
    ),
    (
        51,
        "data keys and inputs do not match",
        "The keys of the data are the names of the model's inputs, plus `labels` or `target`. No other key is allowed and none \
         may be missing: `--map KEY=INPUT` renames a key, `--input NAME=ones|zeros|arange|@FILE.npy` feeds an input that the \
         data do not have.",
    ),
    (
        52,
        "data of another shape",
        "Under --layout samples, dim 0 of every array counts samples and the others are those of the input without its batch \
         dim. Under --layout steps, dim 0 counts optimizer steps and a slice has the input's whole shape. One pass must hold \
         at least one global batch.",
    ),
    (
        53,
        "a value out of range",
        "Values are converted to the input's dtype and checked once, when the data are opened. A token or label must be below \
         the vocabulary or number of classes, or be the ignored index; an integer or float must exist in the input's dtype.",
    ),
    (
        54,
        "an option of a run that cannot be honoured",
        "The message names the option, its value and what was expected: how long to train (`--steps N` or `--epochs N`), what \
         parameters without data begin with (`--init SEED` or `--weights F.safetensors`), an input that nothing feeds, a \
         checkpoint that is not there. `dcc run --help` lists the options with their values.",
    ),
    (
        501,
        "damaged artifact",
        "The bytes of the .dcc file are not those that were written, it is of another version of dcc, or a file of tensors \
         that it names has changed since it was compiled. Copy it again, or compile the model again; `dcc verify FILE.dcc` \
         says whether a file is whole. With --embed-weights an artifact needs no other file.",
    ),
    (
        510,
        "damaged checkpoint",
        "A checkpoint holds the BLAKE3 of each of its files, and every byte is verified before it is used. The message names \
         the file and the tensors whose bytes changed. A folder without MANIFEST is none, or one whose writing was cut off. \
         Resume from another checkpoint: `ls` the --save-dir, then `--resume DIR/step-…`; `dcc inspect DIR/step-…` verifies one.",
    ),
    (
        511,
        "a checkpoint of another model",
        "The checkpoint is intact, but a tensor that the program needs is missing in it or has another shape, or \
         half floats where the program has others. A checkpoint loads under any plan and --dtype of the same model and optimizer. Give the model and the flags that it was trained \
         with, or start anew with `--resume none` and another --save-dir. Another optimizer can begin with the weights: \
         `dcc export CHECKPOINT --safetensors W.safetensors`, then `--weights W.safetensors`.",
    ),
    (
        520,
        "damaged data file",
        "A data file ends early or contradicts its own header; nothing of it was used. Mostly a copy or a program that wrote it \
         was cut off: write or copy it again. `python -c \"import numpy; numpy.load('F')\"` reads the same formats.",
    ),
    (
        601,
        "a rank failed",
        "One of the processes ended before its program did; the message names it, the signal or exit code, and where it was. \
         SIGKILL mostly comes from the kernel when memory runs out: see `dmesg`. --resume auto continues from the last checkpoint.",
    ),
    (
        602,
        "ranks with different programs",
        "Before step 1 the ranks compare build, artifact, options and data. Two differ in the field that the message names: \
         the executable or a file was changed while the run started. Start it again when nothing writes them.",
    ),
    (
        603,
        "ranks meet in different transfers",
        "Two ranks started different collectives in each other's place, or one ended without a transfer that another waits for. \
         Programs that pass the check cannot do this: it is a bug in dcc, and the message belongs in its report.",
    ),
    (
        604,
        "another rank failed",
        "This rank stopped because another one did; that one's error says why. Seen alone, it means that the first rank could \
         not say anything: `dmesg` may show why the system ended it.",
    ),
    (
        701,
        "a rank is silent",
        "A rank has shown no sign of life for longer than --timeout (60 s): it is stopped, starved, or stuck in one operation. \
         The message names it and where it last was. If the machine is overloaded or a step may take that long, raise it: \
         `--timeout 600`. --resume auto continues from the last checkpoint.",
    ),
    (
        801,
        "a file could not be read or written",
        "The message names the file and what the system said. Check the path (it starts at the current folder), who may read \
         and write there (`ls -ld`), and free space (`df -h`). Outputs are written under a temporary name and renamed, so \
         nothing is left half-written.",
    ),
    (
        802,
        "a system call failed",
        "The machine refused memory, a process or a signal; the message says which and why. Usual causes are limits of the \
         session or container (`ulimit -a`): too little memory for the ranks, too many processes or open files. Fewer ranks, \
         or `--memory-limit` when compiling, keep a run within them.",
    ),
    (
        803,
        "a device failed",
        "The device is missing, out of memory or reported an error. Training on CPUs needs Linux, on x86-64 or 64-bit Arm; compiling \
         works elsewhere, and the artifact can be run with `dcc-run` on another machine. `--max-isa` cannot name instructions that the \
         machine lacks.",
    ),
    (
        901,
        "not a finite number",
        "The loss is NaN or infinite; the message names the step, and the input if its batch has NaN or no label that counts. \
         Mostly the learning rate is too high, or the data or the initial weights hold such values. Try a tenth of \
         --lr, `--warmup 100`, `--grad-clip 1`; if step 1 fails already, look at the data. Nothing was saved \
         after the step: --resume auto continues before it.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn every_code_has_a_page() {
        let codes: Vec<u16> = PAGES.iter().map(|page| page.0).collect();
        assert!(codes.is_sorted());
        let path = std::path::Path::new("");
        type Make = fn(&'static str) -> Error;
        let data: [Make; 5] = [Error::data_format, Error::data_keys, Error::data_shape, Error::data_range, Error::data_option];
        let files: [Make; 4] = [Error::artifact, Error::checkpoint, Error::foreign_checkpoint, Error::damaged_data];
        let ranks: [Make; 7] =
            [Error::rank, Error::handshake, Error::mismatch, Error::peer, Error::hang, Error::device, Error::numerical];
        let all = data.iter().chain(&files).chain(&ranks).map(|make| make(""));
        let mut found: Vec<u16> =
            all.chain([Error::io("", path, ""), Error::system("", "")]).map(|e| e.report().code).collect();
        found.sort();
        assert_eq!(found, codes);
    }
}
