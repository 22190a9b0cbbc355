//! `--param 'GLOB=Shard(1)@tp'`: the user fixes the used type of parameters.

use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;

/// The sharding that parameters whose name matches must be used in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// `*` matches any run of characters, `?` one.
    pub glob: String,
    /// The dim over `tp`; `None` is `Replicate`.
    pub dim: Option<u8>,
}

impl Pin {
    /// Reads `GLOB=Shard(D)@tp` or `GLOB=Replicate`. Errors: any other text; an axis that parameters are not sharded over.
    pub fn parse(text: &str) -> Result<Pin> {
        let wrong =
            |why: String| Error::usage(format!("--param {text}: {why}")).help("write GLOB=Shard(DIM)@tp or GLOB=Replicate");
        let (glob, sharding) = text.rsplit_once('=').ok_or_else(|| wrong("no `=`".to_owned()))?;
        let glob = glob.to_owned();
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

    pub fn matches(&self, name: &str) -> bool {
        glob_matches(self.glob.as_bytes(), name.as_bytes())
    }
}

/// The pin that counts for each parameter. Errors: a pin that matches no parameter, or a dim that a match does not have.
pub(super) fn of_params(graph: &Graph, pins: &[Pin]) -> Result<Vec<(NodeId, Option<u8>)>> {
    let params = || graph.ids().filter_map(|id| if let Op::Param(p) = &graph[id].op { Some((id, p)) } else { None });
    for pin in pins {
        let mut matched = false;
        for (id, param) in params().filter(|(_, p)| pin.matches(&p.name)) {
            matched = true;
            let rank = graph.ty(id).rank();
            if let Some(dim) = pin.dim.filter(|&d| usize::from(d) >= rank) {
                let shape = param.shape.to_vec();
                return Err(Error::pin(format!("--param {}=Shard({dim})@tp: {} has shape {shape:?}", pin.glob, param.name)));
            }
        }
        if !matched {
            let some: Vec<&str> = params().map(|(_, p)| p.name.as_str()).take(5).collect();
            return Err(Error::pin(format!("--param {} matches no parameter", pin.glob))
                .help(format!("parameters are named as in {}", some.join(", "))));
        }
    }
    let pinned =
        |(id, p): (NodeId, &crate::ops::Param)| pins.iter().rev().find(|pin| pin.matches(&p.name)).map(|pin| (id, pin.dim));
    Ok(params().filter_map(pinned).collect())
}

fn glob_matches(glob: &[u8], name: &[u8]) -> bool {
    let (mut g, mut n) = (0, 0);
    // Where the last `*` stands and how much of the name it has taken so far.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        if glob.get(g) == Some(&b'*') {
            star = Some((g, n));
            g += 1;
        } else if glob.get(g).is_some_and(|&c| c == b'?' || c == name[n]) {
            (g, n) = (g + 1, n + 1);
        } else if let Some((at, taken)) = star {
            star = Some((at, taken + 1));
            (g, n) = (at + 1, taken + 1);
        } else {
            return false;
        }
    }
    glob[g..].iter().all(|&c| c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_whole_names() {
        let yes = [("h.*.mlp.w?", "h.11.mlp.w1"), ("*", ""), ("a*b*c", "axxbybc"), ("wte", "wte")];
        let no = [("h.*.w", "h.1.w1"), ("?", ""), ("a*b", "ac"), ("", "a")];
        assert!(yes.iter().all(|(g, n)| glob_matches(g.as_bytes(), n.as_bytes())));
        assert!(no.iter().all(|(g, n)| !glob_matches(g.as_bytes(), n.as_bytes())));
    }

    #[test]
    fn pins_parse() {
        assert_eq!(Pin::parse("h.*.w=Shard(1)@tp").unwrap(), Pin { glob: "h.*.w".into(), dim: Some(1) });
        assert_eq!(Pin::parse("a=b=Replicate").unwrap(), Pin { glob: "a=b".into(), dim: None });
        for bad in ["w", "w=Shard(1)", "w=Shard(x)@tp", "w=Shard(1)@dp", "w=Split(1)@tp"] {
            assert_eq!(Pin::parse(bad).unwrap_err().code.0, 1, "{bad}");
        }
    }
}
