//! What the user fixed: `--param 'GLOB=Shard(1)@tp'` the used type of parameters, annotations of the model that of any value.

use super::Parallel;
use super::annotated::{Wish, Wishes};
use crate::error::{Error, Result};
use crate::graph::{Graph, NodeId};
use crate::ops::Op;
use dcc_program::{Glob, Mesh, Sharding};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// The sharding that parameters whose name matches must be used in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    pub glob: Glob,
    /// The dim over `tp`; `None` is `Replicate`.
    pub dim: Option<u8>,
    /// The model's names of parameters that the pattern matches by other names of theirs.
    pub also: BTreeSet<String>,
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.glob.0, self.sharding())
    }
}

impl Pin {
    /// Reads `GLOB=Shard(D)@tp` or `GLOB=Replicate`. Errors: any other text; an axis that parameters are not sharded over.
    pub fn parse(text: &str) -> Result<Pin> {
        let wrong =
            |why: String| Error::usage(format!("--param {text}: {why}")).help("write GLOB=Shard(DIM)@tp or GLOB=Replicate");
        let (glob, sharding) = text.rsplit_once('=').ok_or_else(|| wrong("no `=`".to_owned()))?;
        let glob = Glob::new(glob);
        if sharding == "Replicate" || sharding == "Replicate@tp" {
            return Ok(Pin { glob, dim: None, also: BTreeSet::new() });
        }
        let (shard, axis) = sharding.split_once('@').ok_or_else(|| wrong(format!("`{sharding}` names no mesh axis")))?;
        let dim = shard.strip_prefix("Shard(").and_then(|s| s.strip_suffix(')')).and_then(|d| d.parse().ok());
        let dim = dim.ok_or_else(|| wrong(format!("`{shard}` is neither Shard(DIM) nor Replicate")))?;
        if axis != "tp" {
            return Err(wrong(format!("parameters are sharded over the axis tp, not `{axis}`")));
        }
        Ok(Pin { glob, dim: Some(dim), also: BTreeSet::new() })
    }

    /// The same, of a parameter of the model that has other names too.
    pub fn knowing(mut self, name: &str, others: &[String]) -> Pin {
        if others.iter().any(|other| self.glob.matches(other)) {
            self.also.insert(name.to_owned());
        }
        self
    }

    /// Tells of pins that later ones of the same pattern replace.
    pub fn replaced(pins: &[Pin]) -> impl Iterator<Item = String> {
        pins.iter().enumerate().filter_map(|(at, pin)| {
            let later = pins[at + 1..].iter().rfind(|later| later.glob == pin.glob).filter(|later| later.dim != pin.dim)?;
            Some(format!("`--param {pin}` does not count: a later flag says {}", later.sharding()))
        })
    }

    fn sharding(&self) -> String {
        self.dim.map_or("Replicate".to_owned(), |dim| format!("Shard({dim})@tp"))
    }
}

/// The pins of a graph, flags before annotations.
#[derive(Clone, Debug, Default)]
pub(super) struct Pins {
    /// How a value lies, a parameter where it is used.
    pub values: BTreeMap<NodeId, Wish>,
    /// How a node reads a value: by reader and value.
    pub reads: BTreeMap<(NodeId, NodeId), Wish>,
    /// What flags say of tensor axes alone.
    by_flag: BTreeSet<NodeId>,
}

impl Pins {
    /// Errors: a flag that matches no parameter, or names a dim that a match does not have.
    pub fn of(graph: &Graph, options: &Parallel) -> Result<Pins> {
        let params = || graph.ids().filter_map(|id| if let Op::Param(p) = &graph[id].op { Some((id, p)) } else { None });
        let Wishes { values, reads, .. } = options.wishes.clone();
        let mut pins = Pins { values, reads, by_flag: BTreeSet::new() };
        for pin in &options.pins {
            let at = format!("--param {}={}", pin.glob.0, pin.sharding());
            let mut matched = false;
            for (id, param) in params().filter(|(_, p)| pin.glob.matches(&p.name) || pin.also.contains(&p.name)) {
                matched = true;
                let mut shards = vec![1; param.shape.len()];
                if let Some(dim) = pin.dim.map(usize::from) {
                    let (name, shape, tp) = (&param.name, param.shape.to_vec(), options.tp);
                    match shape.get(dim) {
                        None => return Err(Error::pin(format!("{at}: {name} of shape {shape:?} has no dim {dim}"))),
                        Some(&size) if size < u64::from(tp) => {
                            return Err(Error::pin(format!("{at}: {name} has shape {shape:?}, --tp {tp}")));
                        }
                        Some(_) => {}
                    }
                    shards[dim] = u64::from(options.tp);
                }
                pins.by_flag.insert(id);
                pins.values.insert(id, Wish { shards, holders: Vec::new(), at: at.clone() });
            }
            if !matched {
                let all: BTreeSet<&str> = params().map(|(_, p)| p.name.as_str()).collect();
                let some: Vec<&str> = all.into_iter().take(5).collect();
                return Err(Error::pin(format!("--param {} matches no parameter", pin.glob.0))
                    .help(format!("parameters are named as in {}", some.join(", "))));
            }
        }
        Ok(pins)
    }

    /// The same of parameters whose experts, along these dims, are shared too, by `ep` ranks: whatever flags say.
    pub fn beside_experts(mut self, stacks: &BTreeMap<NodeId, usize>, ep: u32) -> Pins {
        for id in &self.by_flag {
            if let (Some(wish), Some(&dim)) = (self.values.get_mut(id), stacks.get(id)) {
                wish.shards[dim] *= u64::from(ep);
            }
        }
        self
    }
}

impl Wish {
    /// Whether `sharding` is what is asked for, pending sums and microbatches aside.
    pub(super) fn is_met(&self, sharding: &Sharding, mesh: &Mesh) -> bool {
        shards(sharding, mesh) == self.shards && self.is_held(sharding, mesh)
    }

    /// Whether the devices that are to hold each shard do, on whatever stage.
    fn is_held(&self, sharding: &Sharding, mesh: &Mesh) -> bool {
        let held = |rank: u32| mesh.shard(sharding.dims.iter().flatten(), &mesh.coordinates(rank));
        self.holders.iter().zip(0..).all(|(ranks, shard)| ranks.iter().all(|&rank| held(rank) == shard))
    }
}

/// Shards of each dim over the devices of a stage.
pub(super) fn shards(sharding: &Sharding, mesh: &Mesh) -> Vec<u64> {
    sharding.dims.iter().map(|axes| mesh.shards(axes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_parse() {
        assert_eq!(
            Pin::parse("h.*.w=Shard(1)@tp").unwrap(),
            Pin { glob: Glob::new("h.*.w"), dim: Some(1), also: BTreeSet::new() }
        );
        assert_eq!(Pin::parse("a=b=Replicate").unwrap(), Pin { glob: Glob::new("a=b"), dim: None, also: BTreeSet::new() });
        for bad in ["w", "w=Shard(1)", "w=Shard(x)@tp", "w=Shard(1)@dp", "w=Split(1)@tp"] {
            assert_eq!(Pin::parse(bad).unwrap_err().code.0, 1, "{bad}");
        }
    }

    #[test]
    fn replaced_pins_are_told() {
        let told = |texts: &[&str]| {
            let pins: Vec<Pin> = texts.iter().map(|text| Pin::parse(text).unwrap()).collect();
            Pin::replaced(&pins).collect::<Vec<_>>()
        };
        let text = "`--param w=Shard(0)@tp` does not count: a later flag says Replicate";
        assert_eq!(told(&["w=Shard(0)@tp", "w=Replicate"]), [text]);
        assert_eq!(told(&["*=Replicate", "w=Shard(0)@tp", "w=Shard(0)@tp"]), [""; 0]);
    }

    #[test]
    fn pins_know_other_names() {
        let pin = Pin::parse("*wte*=Replicate").unwrap();
        let also = |other: &str| pin.clone().knowing("lm_head", &[other.to_owned()]).also;
        assert_eq!((also("h.wte.weight"), also("h.wpe.weight")), (BTreeSet::from(["lm_head".to_owned()]), BTreeSet::new()));
    }
}
