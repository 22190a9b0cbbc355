//! Attention in the terms of vendors' libraries: tensors of batch, head, position and channel.

use crate::library::attention::{Shape, Strides};
use dcc_program::program::MaskKind;
use dcc_program::types::DType;

/// An attention of half floats, or its gradient, without a mask but that of causality. Strides in elements, of the batch, a head, a position
/// and a channel. Neighbouring query heads share a key head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heads {
    /// Whether Q's, K's and V's gradients are computed: laid out as they are, from one that is laid out as O.
    pub gradient: bool,
    pub dtype: DType,
    pub batch: usize,
    /// Query heads, and key heads.
    pub heads: [usize; 2],
    pub queries: usize,
    pub keys: usize,
    /// Channels of Q and K, and of V and O.
    pub channels: usize,
    pub values: usize,
    /// Bits of an f32.
    pub scale: u32,
    /// Whether a query sees no key behind its own place.
    pub causal: bool,
    pub q: [usize; 4],
    pub k: [usize; 4],
    pub v: [usize; 4],
    pub o: [usize; 4],
    /// Of the logarithms of sums, which are f32; one channel.
    pub lse: [usize; 4],
}

impl Heads {
    /// `None` where the libraries have other terms.
    pub fn new(shape: &Shape, dtype: DType, mask: MaskKind, gradient: bool) -> Option<Heads> {
        let &Shape { batch, heads, groups, queries, keys, channels, values, scale, causal, .. } = shape;
        let sizes = [batch, heads, groups, queries, keys, channels, values];
        let is_taken = dtype.bytes() == 2 && mask == MaskKind::None && matches!(causal, None | Some(0)) && !sizes.contains(&0);
        let tensor = |strides: &Strides, groups: usize, positions: usize, channels: usize| {
            let Strides { batch: b, head: h, group: g, position: p, channel: c } = *strides;
            let head = match (heads, groups) {
                (_, 1) => h,
                (1, _) => g,
                _ if h == groups * g => g,
                _ => return None,
            };
            // A dim of one element lies anywhere; one of several in one place is none that they write.
            let own = [(batch, b), (heads * groups, head), (positions, p), (channels, c)];
            let strides = own.map(|(size, stride)| if size == 1 { stride.max(1) } else { stride });
            (!strides.contains(&0)).then_some(strides)
        };
        let all = is_taken.then_some(Heads {
            gradient,
            dtype,
            batch,
            heads: [heads * groups, heads],
            queries,
            keys,
            channels,
            values,
            scale: (scale as f32).to_bits(),
            causal: causal.is_some(),
            q: tensor(&shape.q, groups, queries, channels)?,
            k: tensor(&shape.k, 1, keys, channels)?,
            v: tensor(&shape.v, 1, keys, values)?,
            o: tensor(&shape.o, groups, queries, values)?,
            lse: tensor(&shape.lse, groups, queries, 1)?,
        });
        all.filter(|heads| [heads.q, heads.k, heads.v, heads.o].iter().all(|strides| strides[3] == 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        let of = |head, group| Strides { batch: 600, head, group, position: 60, channel: 1 };
        Shape {
            batch: 2,
            heads: 3,
            groups: 2,
            queries: 10,
            keys: 10,
            channels: 10,
            values: 10,
            scale: 0.25,
            causal: Some(0),
            q: of(20, 10),
            k: Strides { position: 30, batch: 300, ..of(10, 0) },
            v: Strides { position: 30, batch: 300, ..of(10, 0) },
            o: of(20, 10),
            lse: Strides { batch: 60, head: 2, group: 1, position: 6, channel: 0 },
            mask: Strides::default(),
        }
    }

    #[test]
    fn heads_and_groups_are_one_dim() {
        let heads = Heads::new(&shape(), DType::BF16, MaskKind::None, false).unwrap();
        assert_eq!((heads.heads, heads.q, heads.k, heads.lse), ([6, 3], [600, 10, 60, 1], [300, 10, 30, 1], [60, 1, 6, 1]));
        assert_eq!((f32::from_bits(heads.scale), heads.causal), (0.25, true));
        let single = Shape { heads: 1, k: Strides { head: 0, ..shape().k }, v: Strides { head: 0, ..shape().v }, ..shape() };
        assert_eq!(
            Heads::new(&single, DType::F16, MaskKind::None, true).map(|heads| (heads.heads, heads.k[1])),
            Some(([2, 1], 1))
        );
    }

    #[test]
    fn what_libraries_have_no_terms_for() {
        let of = |shape: Shape, dtype, mask| Heads::new(&shape, dtype, mask, false);
        assert_eq!(of(shape(), DType::F32, MaskKind::None), None);
        assert_eq!(of(shape(), DType::BF16, MaskKind::Additive), None);
        assert_eq!(of(Shape { causal: Some(3), ..shape() }, DType::BF16, MaskKind::None), None);
        assert_eq!(of(Shape { keys: 0, ..shape() }, DType::BF16, MaskKind::None), None);
        let apart = Strides { head: 10, group: 30, ..shape().q };
        assert_eq!(of(Shape { q: apart, ..shape() }, DType::BF16, MaskKind::None), None, "groups lie outside of heads");
        let repeated = Strides { batch: 0, ..shape().k };
        assert_eq!(of(Shape { k: repeated, ..shape() }, DType::BF16, MaskKind::None), None, "keys that all samples share");
    }
}
