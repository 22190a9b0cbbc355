//! The page of each fault: what `dcc explain CODE` prints. Whoever meets one has programs that dcc did not make as they are.

use super::Fault;

/// What every page ends with.
const HELP: &str = "The gate checks all programs when they are compiled and again when an artifact is loaded. An artifact of \
                    another version of dcc, or one that was edited by hand, is refused like this: compile the model again with \
                    `dcc compile`. If that does not help, it is a bug in dcc; please report it with the model (without its \
                    weights) and the command.";

impl Fault {
    /// Number, title and text of every fault, in the order of their numbers.
    pub fn pages() -> impl Iterator<Item = (u16, &'static str, String)> {
        PAGES.iter().map(|(fault, title, text)| (fault.number(), *title, format!("{text} {HELP}")))
    }
}

const PAGES: &[(Fault, &str, &str)] = &[
    (
        Fault::Mesh,
        "the gate: the mesh, or stages that do not belong together",
        "An axis has no rank or two have one name, or the programs of an artifact are not one for each stage of the \
         same mesh.",
    ),
    (
        Fault::Malformed,
        "the gate: an instruction that cannot be",
        "An instruction names a buffer, kernel or token that is not there, or has too many or too few operands.",
    ),
    (
        Fault::Type,
        "the gate: a type that cannot be",
        "A shape overflows, or a dim is sharded over an axis that the mesh does not have, or twice over one.",
    ),
    (
        Fault::Bounds,
        "the gate: a buffer outside of its block",
        "Offset and size of a buffer reach beyond the memory that the program plans for its block, or are not aligned.",
    ),
    (
        Fault::Kernel,
        "the gate: a kernel that makes no sense",
        "A generated kernel reads or writes outside of its operands, or its loops do not cover its result.",
    ),
    (
        Fault::External,
        "the gate: a parameter, input, scalar or output",
        "What a program exchanges with the world is not where, or not of the type that, its own table or another \
         stage's says.",
    ),
    (
        Fault::Sharding,
        "the gate: operands are not sharded as the operation needs",
        "The shards that an instruction gets do not correspond: each rank would combine parts that do not belong \
         together.",
    ),
    (
        Fault::Pending,
        "the gate: a partial sum read as whole",
        "An operand is a sum over ranks that no all_reduce has completed yet, and the operation is not linear in it.",
    ),
    (
        Fault::Declared,
        "the gate: a result of another type than declared",
        "The type that follows from the operands differs from the one that the program gives its result.",
    ),
    (
        Fault::InPlace,
        "the gate: operand and result share memory wrongly",
        "They overlap where the operation reads after it writes, or are apart where it must update in place.",
    ),
    (
        Fault::Unwritten,
        "the gate: a read before any write",
        "An instruction reads memory that holds nothing yet, in this section or for this microbatch.",
    ),
    (
        Fault::Overwritten,
        "the gate: a read of a value that is gone",
        "Another value was written over the one that an instruction names, before it reads it.",
    ),
    (
        Fault::Microbatch,
        "the gate: a value of another microbatch",
        "A section reads what belongs to another microbatch than the one that it runs for.",
    ),
    (
        Fault::Accumulator,
        "the gate: a gradient accumulator used out of turn",
        "An accumulator is read before its last addition, or added to before it is zeroed.",
    ),
    (
        Fault::InFlight,
        "the gate: a buffer touched during its transfer",
        "Between the start of a transfer and its wait, an instruction writes what is sent or reads what is received.",
    ),
    (
        Fault::Unwaited,
        "the gate: a start without wait, or a wait without start",
        "Each transfer is started once and waited for once, in the same section.",
    ),
    (
        Fault::Order,
        "the gate: sections run in a wrong order",
        "A section runs more or less often than once for each microbatch or step, or before one that it depends on.",
    ),
    (
        Fault::Unmatched,
        "the gate: transfers that do not match",
        "A stage sends what its peer does not expect next, or the members of a group start different collectives.",
    ),
    (
        Fault::Deadlock,
        "the gate: stages wait for each other",
        "Following starts and waits through all stages leads into a circle: the run would hang.",
    ),
    (
        Fault::Unused,
        "the gate: a value that nothing reads",
        "An instruction computes what nothing reads, or what is written once more before anything has, or an area keeps it for a \
         section that does not read it: what was to use it, such as one term of a sum, has been lost.",
    ),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_faults_have_a_page() {
        let source = include_str!("../check.rs");
        let (_, rest) = source.split_once("pub enum Fault {").expect("the enum");
        let (body, _) = rest.split_once('}').expect("its end");
        let variants = body.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with("//"));
        assert_eq!(variants.count(), PAGES.len());
        assert!(PAGES.windows(2).all(|pair| pair[0].0.number() + 1 == pair[1].0.number()));
    }
}
