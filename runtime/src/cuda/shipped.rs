//! Machine code that comes with an artifact, so that a run needs no NVRTC.
//!
//! A piece is named by what it is for and the hash of the text that it was made of.

use super::copies::Copies;
use super::nvrtc::Image;
use super::{Arch, Kernels, Target, Texts, cache};
use crate::error::Result;
use crate::exec::{World, add_texts};
use crate::parallel::side_by_side;
use bytes::Bytes;
use dcc_kernels::cuda::Source;
use dcc_program::artifact::Artifact;
use std::collections::BTreeMap;

/// Pieces by name; see `Artifact::code`.
#[derive(Clone, Debug, Default)]
pub struct Shipped(BTreeMap<String, Bytes>);

impl Shipped {
    pub fn of(artifact: &Artifact) -> Shipped {
        Shipped(artifact.code.clone())
    }

    /// What `text` was compiled to for just that GPU.
    pub(super) fn made_for(&self, text: &str, arch: Arch) -> Option<Image> {
        self.find(text, Target::Code(arch))
    }

    /// The best that a GPU of `arch` takes: code for its own generation or an older one of its major number, else PTX, which its driver compiles.
    pub(super) fn taken_by(&self, text: &str, arch: Arch) -> Option<Image> {
        let targets = self.targets();
        let newest_first = || targets.iter().rev().copied();
        let code = newest_first().filter(|target| matches!(target, Target::Code(code) if code.runs_on(arch)));
        let ptx = newest_first().filter(|target| matches!(target, Target::Ptx(least) if *least <= arch));
        code.chain(ptx).find_map(|target| self.find(text, target))
    }

    /// What there is code for, ascending.
    pub fn targets(&self) -> Vec<Target> {
        self.sizes().into_keys().collect()
    }

    /// Bytes of all code for each target.
    pub fn sizes(&self) -> BTreeMap<Target, usize> {
        let mut sizes = BTreeMap::new();
        for (name, code) in &self.0 {
            if let Some(target) = name.split_once('.').and_then(|(target, _)| Target::parse(target).ok()) {
                *sizes.entry(target).or_insert(0) += code.len();
            }
        }
        sizes
    }

    fn find(&self, text: &str, target: Target) -> Option<Image> {
        cache::unpacked(self.0.get(&name(text, target))?)
    }
}

fn name(text: &str, target: Target) -> String {
    format!("{}.{}", target.name(), blake3::hash(text.as_bytes()).to_hex())
}

/// Code of all kernels of all ranks for each of `targets`, as `Artifact::code` has it. Errors: NVRTC is missing or refuses a text; a program that
/// has no kernels for GPUs.
pub fn code(artifact: &Artifact, targets: &[Target]) -> Result<BTreeMap<String, Bytes>> {
    let sets: Vec<_> = [&artifact.train[..], &artifact.eval[..]].into_iter().filter(|set| !set.is_empty()).collect();
    let world = World::new(&sets)?;
    let mut wanted: BTreeMap<String, Vec<Source>> = BTreeMap::new();
    let mut want = |sources: &[Source]| {
        for part in cache::parts(sources) {
            wanted.entry(Kernels::text(part)).or_insert_with(|| part.to_vec());
        }
    };
    for rank in 0..world.ranks() {
        // As a rank prepares them: the training program's, then what an evaluation needs beside, then what a trace runs by itself.
        let mut texts = Texts::default();
        for set in &sets {
            add_texts(&mut texts, &world, &set[world.stage(rank) as usize], rank)?;
            let batch = texts.batch();
            want(&texts.sources_of(&batch));
        }
        texts.rest().iter().for_each(|batch| want(&texts.sources_of(batch)));
    }
    if world.ranks() > 1 {
        want(&Copies::sources(world.reductions()));
    }
    let texts: Vec<(&String, Target)> =
        wanted.keys().flat_map(|text| targets.iter().map(move |target| (text, *target))).collect();
    let images =
        side_by_side(&texts, cache::PARTS, |&(text, target)| cache::compiled(text, target, cache::folder().as_deref()))?;
    let named =
        texts.iter().zip(&images).map(|(&(text, target), image)| (name(text, target), Bytes::from(cache::packed(image))));
    Ok(named.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_takes_the_best_that_it_can_run() {
        let targets = ["sm_80", "sm_86", "sm_90a", "compute_80", "compute_90"].map(|text| Target::parse(text).unwrap());
        let image = |target: Target| Image { code: target.name().into_bytes(), log: String::new() };
        let piece = |target| (name("text", target), Bytes::from(cache::packed(&image(target))));
        let shipped = Shipped(targets.into_iter().map(piece).collect());
        assert_eq!(shipped.targets(), targets);
        let taken = |major, minor| String::from_utf8(shipped.taken_by("text", Arch { major, minor }).unwrap().code).unwrap();
        let of = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)].map(|(major, minor)| taken(major, minor));
        assert_eq!(of, ["sm_80", "sm_86", "sm_86", "sm_90a", "compute_90", "compute_90"]);
        assert!(
            shipped.made_for("text", Arch { major: 8, minor: 9 }).is_none()
                && shipped.made_for("text", Arch { major: 9, minor: 0 }).is_some()
        );
        assert!(shipped.taken_by("another text", Arch { major: 9, minor: 0 }).is_none());
    }

    #[test]
    fn targets_are_code_or_ptx() {
        for text in ["sm_80", "sm_90a", "sm_100a", "compute_80", "compute_90"] {
            assert_eq!(Target::parse(text).unwrap().name(), text);
        }
        for text in ["sm_75", "sm_90", "compute_70", "compute_90a", "compute_", "ptx", ""] {
            assert!(Target::parse(text).is_err(), "{text}");
        }
    }
}
