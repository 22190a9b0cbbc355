//! What became of parameters, for the user to know.

use super::trace::Trace;

const ADVICE: &str = "export with `optimize=False`";

/// The first of `names`.
pub fn few(names: &[String]) -> String {
    let shown = names.iter().take(3).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    if names.len() > 3 { shown + ", …" } else { shown }
}

/// One line for each fate, of a module with `total` parameters.
pub fn warnings(trace: &Trace, total: usize) -> Vec<String> {
    let Trace { lost, rows, tables, others, numbers, constants, turned, merged, .. } = trace;
    let about = |names: &[String], text: &dyn Fn(String) -> String| (!names.is_empty()).then(|| text(few(names)));
    let lines = [
        about(lost, &|names| {
            format!(
                "{} of the module's {total} parameters are not in the file ({names}): the exporter folded or dropped them, so \
                 training differs from PyTorch's; {ADVICE}",
                lost.len()
            )
        }),
        about(rows, &|names| {
            format!(
                "{names} in the file: rows that the exporter looked up in {}, which train one by one; {ADVICE}",
                few(tables)
            )
        }),
        about(numbers, &|names| {
            let from = few(others);
            format!(
                "{names} in the file: computed by the exporter, it seems from {from}, which therefore do not train; {ADVICE}"
            )
        }),
        about(turned, &|names| {
            let from = few(tables);
            format!("{names} in the file: transposed by the exporter, it seems out of {from}, and trained as such; {ADVICE}")
        }),
        about(merged, &|names| {
            format!(
                "{names} in the file: several parameters of the module that were equal when it was exported, and train as one; \
                 {ADVICE}"
            )
        }),
        about(&trace.unnamed(), &|names| {
            format!("{names} in the file: parameters of the module in another layout, known by these names only; {ADVICE}")
        }),
        about(&trace.unread(), &|names| {
            format!(
                "no node reads {names}: unless the module does not use them, the exporter merged them with equal ones or computed \
                 constants of them, and they do not train; {ADVICE}"
            )
        }),
        about(constants, &|names| {
            format!(
                "{names} in the file: no parameter of the module, nor read in place of one; taken for what the exporter computed \
                 from buffers, and held constant"
            )
        }),
    ];
    lines.into_iter().flatten().collect()
}
