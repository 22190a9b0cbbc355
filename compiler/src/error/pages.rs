//! The page of each error code: what `dcc explain CODE` prints.

use super::Code;

/// What a code means, why it happens and what to do.
#[derive(Debug)]
pub struct Page {
    pub code: Code,
    pub title: &'static str,
    pub text: &'static str,
}

/// The page of `code`.
pub fn page(code: Code) -> Option<&'static Page> {
    PAGES.iter().find(|page| page.code == code)
}

const fn entry(code: u16, title: &'static str, text: &'static str) -> Page {
    Page { code: Code(code), title, text }
}

/// In the order of their codes.
pub const PAGES: &[Page] = &[
    entry(
        1,
        "wrong flag or value",
        "The command line asks for something that does not exist or contradicts itself. `dcc COMMAND --help` lists the \
         flags of a command with their values; the message names the one that is meant where a flag is misspelt. Flags that say \
         how to compile belong to `dcc compile`, and to `dcc run` on a model; an artifact is compiled already.",
    ),
    entry(
        2,
        "something dcc must know was left open",
        "A model with symbolic dims (`batch`, `seq`) has no size until the command gives one: `--dim NAME=N` for each, and \
         `--global-batch-size B` for the batch. The message lists all that is open at once, and its help is the whole command to \
         type.",
    ),
    entry(
        3,
        "what to minimise was left open",
        "Neither the outputs of the model nor the keys of the data say which loss is meant: no scalar output, no integer \
         labels that fit. `--loss` names one, and `--output` the output that it is of. Labels in the data have the key \
         `labels`, targets `target`; `--map KEY=labels` renames.",
    ),
    entry(
        101,
        "not an ONNX model",
        "The file is not an ONNX protobuf, or it is cut off or damaged. Compare its size with the original, or export it \
         again. Git LFS leaves small text files in place of large ones until `git lfs pull`.",
    ),
    entry(
        102,
        "operator not supported",
        "The model uses an ONNX operator that dcc does not import. README.md lists those it does. If the node comes from \
         pre- or post-processing, cut it off at export: only what leads to the loss has to be in the file.",
    ),
    entry(
        103,
        "opset not supported",
        "dcc reads opsets 7 and up of the default ONNX domain, and is tested on 17 to 23. An operator also has to exist in \
         the opset that the file declares. `torch.onnx.export(…, opset_version=20)` chooses one.",
    ),
    entry(
        104,
        "shapes do not fit",
        "An operator got operands whose shapes do not fit together. Usually a size was baked in at export (a batch, a head \
         size) that no longer holds for the dims on the command line. Compare the shapes in the message with those that the \
         exporter saw: give the same sizes by `--dim` and `--global-batch-size`, or export again with `dynamic_shapes=` for \
         the dims that change.",
    ),
    entry(
        105,
        "dtypes do not fit",
        "An operator got operands of different or unsupported dtypes. dcc computes with f32, f64, f16 and bf16, the \
         integers that index and count, and bool; strings, complex numbers and quantised types are not supported. Export the \
         model before it is quantised (`model.float()`), and leave tokenizers out of it.",
    ),
    entry(
        106,
        "attribute not supported",
        "The node sets an attribute that dcc does not honour, so training would silently differ from what the model says. \
         Nothing is ever accepted and ignored. Usual causes are rarely used modes of an operator, and attributes of an opset \
         other than the file's: `torch.onnx.export(…, opset_version=20)` writes another form. If the node does not lead to the \
         loss, leave it out of the export.",
    ),
    entry(
        107,
        "malformed graph",
        "ONNX graphs define every value once and before it is read. A model that breaks this was written or edited by a \
         faulty tool; `python -c \"import onnx; onnx.checker.check_model('model.onnx')\"` reports the same. Export it again.",
    ),
    entry(
        108,
        "beyond the limits",
        "A tensor has more elements than can be addressed, or the file nests deeper than any exporter writes. Such a file \
         is damaged or hostile, or a size on the command line has digits too many. Export the model again; check `--dim` and \
         `--global-batch-size`.",
    ),
    entry(
        109,
        "damaged tensor",
        "The bytes of an initializer or constant do not match its dims and dtype: the file was cut off, or edited by a tool \
         that changed one of them only. Export the model again.",
    ),
    entry(
        110,
        "external data",
        "Tensors may live in files beside the model. Their paths are relative and must stay inside the model's folder, \
         symbolic links included: a model must not make a reader open `/etc/passwd`. Move the files into the folder and export \
         again (`onnx.save(…, save_as_external_data=True, location=\"model.data\")`). Compiling never reads weights, so their \
         files may be absent until the model is run; constants that decide shapes may not.",
    ),
    entry(
        111,
        "needed while compiling, known only at run time",
        "All shapes are static in dcc. A shape, axis, size or index that has to be known while compiling must not depend on \
         parameters or on inputs. Usual causes are masks made with NonZero, loops over a data-dependent length, and sizes passed \
         as inputs. Make them constants of the export, or compute them from shapes.",
    ),
    entry(
        112,
        "baked batch size",
        "The file was exported with a fixed batch size. For another one dcc follows the batch dim through the graph and \
         scales it, constants included; here a constant may be the batch or may only happen to have its value. Export \
         with a symbolic batch dim (`dynamic_shapes=`), or train with the batch size of the file.",
    ),
    entry(
        301,
        "the model does not allow this plan",
        "Microbatches are computed one after the other, so no op may need the samples of several of them at once, and what the \
         loss divides by (the number of valid labels) must not depend on parameters. `--grad-accum 1` trains on the whole batch; \
         with `--pp` that leaves stages waiting, so fewer stages may be faster.",
    ),
    entry(
        302,
        "batch sizes do not fit together",
        "A step trains on B samples: B = m · dp · ep · M, where m is the microbatch of one data-parallel rank and M the number of \
         microbatches. Any two of --global-batch-size, --micro-batch-size and --grad-accum fix the third; dp · ep has to divide B.",
    ),
    entry(
        303,
        "more stages than work",
        "Every pipeline stage computes at least one matrix product, attention or lookup on the batch. A model with fewer of \
         these than --pp has no use for so many stages; --dp or --tp can use the other devices.",
    ),
    entry(
        304,
        "a pinned sharding cannot be followed",
        "--param 'GLOB=Shard(DIM)@tp' fixes how the parameters whose name matches are used. The glob has to match a \
         parameter, DIM counts its dims from 0, and the dim has to have at least as many elements as the axis has ranks. Device \
         annotations of the model fix shards and stages likewise: docs/sharding.md says how they are read.",
    ),
    entry(
        312,
        "tensor parallelism does not fit the model",
        "A model without any matrix product, attention or lookup has nothing to split. --sequence-parallel splits \
         what lies between these along a dim that is neither of samples nor of weights, such as a sequence: where values have only \
         samples and features, there is none, and --tp alone does all it can. Attention is split by whole heads: where --tp does not \
         divide their number, some or all ranks compute the same ones, as a warning tells, and only the rest is split.",
    ),
    entry(
        313,
        "context parallelism does not fit the model",
        "--cp splits the sequences of samples: the dim of inputs whose elements attention has queries and keys of, such as the tokens \
         of a text. A model has none whose inputs are vectors or images, whose sequences are shorter than the ranks are many, or \
         which computes with no two positions at once. --dp splits samples, --tp --sequence-parallel what a model makes of them.",
    ),
    entry(
        314,
        "expert parallelism does not fit the model",
        "--ep splits the experts of mixtures: a weight that stacks their matrices, of shape [experts, in, out] in any order, that a \
         product goes through expert by expert, such as `einsum('ecd,edf->ecf', sent, weight)` or torch.bmm, for at least as many \
         experts as ranks. Tokens may be sent to experts by products with a mask of experts and slots, or all experts may compute all \
         tokens. Experts that are modules of their own (an nn.ModuleList of nn.Linear) have no such weight, nor have weights that are \
         looked up for each token: keep them as one nn.Parameter and export again. --dp splits samples whatever the model.",
    ),
    entry(
        401,
        "the plan needs more memory than allowed",
        "All memory is planned while compiling: weights, optimizer state, gradients, activations, scratch. --memory-limit \
         refuses a plan whose fullest rank needs more; the need that is told is the least that was found, with all that can be computed again. \
         More tensor-parallel ranks (--tp), smaller microbatches (--micro-batch-size), shards (--zero 3) and mostly more stages \
         (--pp) make it smaller; the message says what each of these would need.",
    ),
    entry(
        811,
        "built without the second opinion",
        "`dcc verify MODEL.onnx` computes the model with tract too, another implementation of ONNX. It takes minutes to build, so \
         that dcc is built without it unless it is asked for: `cargo build --release --bin dcc --features tract`.",
    ),
    entry(
        812,
        "the model is too large to be verified whole",
        "`dcc verify ARTIFACT --model MODEL.onnx` trains all ranks, and then one device, in one process, with all of their memory. Where \
         this machine has less, --numeric compares every tensor of an instance with smaller dims on a smaller mesh: the same nodes, \
         the same strategies.",
    ),
    entry(
        911,
        "dcc and tract compute different values",
        "`dcc verify MODEL.onnx` computed the model's values with dcc and with tract, from the same inputs and weights. The \
         message names the first node whose result differs although what it reads does not, and says whether dcc's slow reference \
         (`dcc eval --backend interp`) sides with its kernels or with tract. One of the two has a bug; please report it with \
         the model (without its weights) and the command. A value that is nearly undefined by its inputs, such as the sign of a \
         rounding error, differs without a bug: give other inputs by `--seed` or `--inputs`.",
    ),
    entry(
        1001,
        "bug in dcc: an invariant does not hold",
        "A pass of the compiler made something that the next one refuses. This is a bug in dcc, whatever the model. Please \
         report it with the model (without its weights) and the command.",
    ),
    entry(
        1002,
        "bug in dcc: a panic",
        "dcc stopped at a condition that it takes for impossible. This is a bug in dcc, whatever the input. Please report it \
         with the command and the model; `RUST_BACKTRACE=1` shows where it happened.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_sorted_and_unique() {
        assert!(PAGES.windows(2).all(|pair| pair[0].code < pair[1].code));
    }
}
