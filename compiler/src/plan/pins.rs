//! `--param 'GLOB=Shard(1)@tp'`: the user fixes the used type of parameters.

use super::Parallel;
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use dcc_program::Glob;

/// The sharding that parameters whose name matches must be used in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    pub glob: Glob,
    /// The dim over `tp`; `None` is `Replicate`.
    pub dim: Option<u8>,
}

impl Pin {
    /// Reads `GLOB=Shard(D)@tp` or `GLOB=Replicate`. Errors: any other text; an axis that parameters are not sharded over.
    pub fn parse(text: &str) -> Result<Pin> {
        let wrong =
            |why: String| Error::usage(format!("--param {text}: {why}")).help("write GLOB=Shard(DIM)@tp or GLOB=Replicate");
        let (glob, sharding) = text.rsplit_once('=').ok_or_else(|| wrong("no `=`".to_owned()))?;
        let glob = Glob::new(glob);
        if sharding == "Replicate" || sharding == "Replicate@tp" {
            return Ok(Pin { glob, dim: None });
        }
        let (shard, axis) = sharding.split_once('@').ok_or_else(|| wrong(format!("`{sharding}` names no mesh axis")))?;
        let dim = shard.strip_prefix("Shard(").and_then(|s| s.strip_suffix(')')).and_then(|d| d.parse().ok());
        let dim = dim.ok_or_else(|| wrong(format!("`{shard}` is neither Shard(DIM) nor Replicate")))?;
        if axis != "tp" {
            return Err(wrong(format!("parameters are sharded over the axis tp, not `{axis}`")));
        }
        Ok(Pin { glob, dim: Some(dim) })
    }
}

/// The pin that counts for each parameter. Errors: a pin that matches no parameter, or a dim that a match does not have.
pub(super) fn of_params(graph: &Graph, options: &Parallel) -> Result<Vec<(NodeId, Option<u8>)>> {
    let params = || graph.ids().filter_map(|id| if let Op::Param(p) = &graph[id].op { Some((id, p)) } else { None });
    let pins = &options.pins;
    for pin in pins {
        let mut matched = false;
        for (_, param) in params().filter(|(_, p)| pin.glob.matches(&p.name)) {
            matched = true;
            let fits = |&d: &u8| param.shape.get(usize::from(d)).is_some_and(|&size| size >= u64::from(options.tp));
            if let Some(dim) = pin.dim.filter(|d| !fits(d)) {
                let shape = param.shape.to_vec();
                return Err(Error::pin(format!(
                    "--param {}=Shard({dim})@tp: {} has shape {shape:?}, --tp {}",
                    pin.glob.0, param.name, options.tp
                )));
            }
        }
        if !matched {
            let some: Vec<&str> = params().map(|(_, p)| p.name.as_str()).take(5).collect();
            return Err(Error::pin(format!("--param {} matches no parameter", pin.glob.0))
                .help(format!("parameters are named as in {}", some.join(", "))));
        }
    }
    let pinned = |(id, p): (NodeId, &crate::ops::Param)| {
        pins.iter().rev().find(|pin| pin.glob.matches(&p.name)).map(|pin| (id, pin.dim))
    };
    Ok(params().filter_map(pinned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_parse() {
        assert_eq!(Pin::parse("h.*.w=Shard(1)@tp").unwrap(), Pin { glob: Glob::new("h.*.w"), dim: Some(1) });
        assert_eq!(Pin::parse("a=b=Replicate").unwrap(), Pin { glob: Glob::new("a=b"), dim: None });
        for bad in ["w", "w=Shard(1)", "w=Shard(x)@tp", "w=Shard(1)@dp", "w=Split(1)@tp"] {
            assert_eq!(Pin::parse(bad).unwrap_err().code.0, 1, "{bad}");
        }
    }
}
