//! What became of parameters, for the user to know. Every line names all that it is about.

use super::trace::Trace;
use crate::import::fillers::Fillers;

/// What to do about an export that changed parameters.
pub const ADVICE: &str =
    "export with `torch.onnx.export(model.train(), args, \"model.onnx\", dynamo=True, optimize=False)`, which keeps them";

/// Each of `names`, quoted.
pub fn listed<T: AsRef<str>>(names: &[T]) -> String {
    names.iter().map(|name| format!("`{}`", name.as_ref())).collect::<Vec<_>>().join(", ")
}

/// Of buffers that the module changes in every call.
pub fn changed(buffers: &[&str]) -> Option<String> {
    (!buffers.is_empty()).then(|| {
        let names = listed(buffers);
        format!(
            "{names}: buffers that the module changes in every call; the file has only their values, which are held constant"
        )
    })
}

/// Of means and variances of batch norms that are no operators of their own.
pub fn written_out(moments: &[String]) -> Option<String> {
    (!moments.is_empty()).then(|| {
        let names = listed(moments);
        format!(
            "{names}: running means and variances of batch norms that the exporter wrote out as for inference; they are held constant, \
             and training normalises by them"
        )
    })
}

/// Of means and deviations of inputs.
pub fn standardising(rows: &[String]) -> Option<String> {
    (!rows.is_empty()).then(|| {
        let names = listed(rows);
        format!("{names}: means and deviations that inputs are standardised by, as a Normalization layer does; they are held constant")
    })
}

/// Of what converters wrote for operands that their frameworks have not.
pub fn filled(fillers: &Fillers) -> impl Iterator<Item = String> {
    let about = |names: Vec<&String>, text: &str| (!names.is_empty()).then(|| format!("{}: {text}", listed(&names)));
    let halves =
        "biases of recurrent layers, of which ONNX has two where Keras has one: the second half, zeros, is held constant";
    let whole = "zeros and ones that the converter wrote where ONNX' operators have more operands than the framework's: what recurrent \
                 layers begin with, gains and biases inside of group norms; they are held constant";
    [about(fillers.halves.iter().collect(), halves), about(fillers.whole.keys().collect(), whole)].into_iter().flatten()
}

/// Of parameters that no gradient reaches.
pub fn unreached(parameters: &[String]) -> Option<String> {
    (!parameters.is_empty()).then(|| {
        let names = listed(parameters);
        format!("no gradient reaches {names} (rounding, comparisons and indices pass none): they are held constant")
    })
}

/// One line for each fate, of a module with `total` parameters.
pub fn warnings(trace: &Trace, total: usize) -> Vec<String> {
    let Trace { lost, rows, tables, others, numbers, constants, turned, merged, .. } = trace;
    let about = |names: &[String], text: &dyn Fn(String) -> String| (!names.is_empty()).then(|| text(listed(names)));
    let unread = trace.unread();
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
                listed(tables)
            )
        }),
        about(numbers, &|names| {
            let from = listed(others);
            format!(
                "{names} in the file: computed by the exporter, it seems from {from}, which therefore do not train; {ADVICE}"
            )
        }),
        about(turned, &|names| {
            let from = listed(tables);
            format!("{names} in the file: transposed by the exporter, it seems out of {from}, and trained as such; {ADVICE}")
        }),
        about(merged, &|names| {
            format!(
                "{names} in the file: several parameters of the module that were equal when it was exported, and train as one; \
                 {ADVICE}"
            )
        }),
        about(&trace.unnamed(), &|names| {
            let of = match &trace.unnamed_of()[..] {
                [] => "parameters".to_owned(),
                of => listed(of),
            };
            format!("{names} in the file: {of} of the module in another layout, known by the names in the file only; {ADVICE}")
        }),
        about(&unread, &|names| {
            format!(
                "no node reads {names}: unless the module does not use them, the exporter merged them with equal ones or computed \
                 constants of them, and they do not train; {ADVICE}"
            )
        }),
        about(constants, &|names| {
            let from = match unread.is_empty() {
                true => "of buffers, or of parameters that other nodes read too".to_owned(),
                false => format!("of buffers or of parameters, such as {}", listed(&unread)),
            };
            format!(
                "{names} in the file: computed by the exporter {from}, which the file does not say, and held constant; if \
                 parameters are among them, {ADVICE}"
            )
        }),
    ];
    lines.into_iter().flatten().collect()
}
