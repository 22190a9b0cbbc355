//! Products and the elementwise kernels that read their results first: the two as one, which reads no result, and writes none that nobody
//! else reads.

use super::device::{Call, Texts};
use super::groups::{Member, Unit};
use crate::error::{Error, Result};
use crate::exec::Span;
use dcc_kernels::Nest;
use dcc_kernels::cuda::library::product::{Beside, Product};
use dcc_kernels::cuda::{Meaning, Source};
use std::sync::Arc;

/// Members of a row, as far as their order is concerned, that run as one.
pub(super) struct Item {
    pub unit: Unit,
    pub members: Vec<Member>,
    /// Where they are a product and its tail.
    pub tail: Option<Tail>,
}

/// A product's kernel with its tail.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tail {
    pub kernel: usize,
    pub pair: Pair,
}

/// A product and the kernel behind it: which kernels, and which of the second one's inputs is the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pair {
    pub product: usize,
    pub nest: usize,
    pub given: usize,
    pub beside: Beside,
}

/// A product with its tail, as others can make it.
pub struct Tailed {
    pub product: Arc<Product>,
    pub nest: Arc<Nest>,
    /// Which of the nest's inputs is the result.
    pub given: usize,
    pub beside: Beside,
    /// What the product is a part of.
    pub origin: String,
}

impl Texts {
    /// All products with tails.
    pub fn tailed(&self) -> Vec<Tailed> {
        let one = |(pair, kernel): (&Pair, &Option<usize>)| {
            let of = |kernel: usize| self.sources[kernel].meaning.clone();
            match (kernel, of(pair.product), of(pair.nest)) {
                (Some(_), Meaning::Product(product), Meaning::Nest(nest)) => {
                    let origin = self.origin(pair.product).to_owned();
                    Some(Tailed { product, nest, given: pair.given, beside: pair.beside, origin })
                }
                _ => None,
            }
        };
        self.tails.iter().filter_map(one).collect()
    }

    /// Makes one of products and the kernels behind them, as far as that changes the order of nothing that must stay in order.
    pub(super) fn with_tails(&mut self, calls: &[&Call], units: Vec<(Unit, Member)>) -> Result<Vec<Item>> {
        let item = |(unit, member)| Item { unit, members: vec![member], tail: None };
        let items = units.into_iter().map(item).collect();
        let items = paired(self, items, |texts, items, at| texts.reader(calls, items, at), Texts::with_tail)?;
        for item in &items {
            if let (Some(tail), [product, _]) = (item.tail, &item.members[..]) {
                calls[product.call].tail.set(Some(tail.kernel));
            }
        }
        Ok(items)
    }

    /// The place of the item that could be the tail of the one at `at`, as far as operands are concerned.
    fn reader(&self, calls: &[&Call], items: &[Item], at: usize) -> Option<(usize, Pair)> {
        let [member] = &items[at].members[..] else { return None };
        let product = calls[member.call];
        let (Meaning::Product(_), [lhs, rhs, result]) = (&self.sources[product.kernel].meaning, &product.operands[..]) else {
            return None;
        };
        let beside = if product.is_passed_on { Beside::Dropped } else { Beside::Stored };
        let touches = |item: &Item| item.unit.reads.iter().chain(&item.unit.writes).any(|span| span.overlaps(result));
        let behind = (at + 1..items.len()).find(|&n| touches(&items[n]))?;
        let [tail] = &items[behind].members[..] else { return None };
        let nest = calls[tail.call];
        let (reads, writes) = nest.operands.split_at(nest.reads);
        let mut all = (0..reads.len()).filter(|&n| reads[n].overlaps(result));
        // Blocks of the product read its operands while others are done.
        let lost = |span: &Span| span.overlaps(lhs) || span.overlaps(rhs) || beside == Beside::Stored && span.overlaps(result);
        let given = all.next().filter(|&given| reads[given] == *result && !writes.iter().any(lost))?;
        let pair = Pair { product: product.kernel, nest: nest.kernel, given, beside };
        all.next().is_none().then_some((behind, pair))
    }

    /// The kernel of both, where there is one.
    fn with_tail(&mut self, pair: Pair) -> Result<Option<usize>> {
        if let Some(known) = self.tails.get(&pair) {
            return Ok(*known);
        }
        let number = self.sources.len();
        let [product, nest] = [pair.product, pair.nest].map(|kernel| &self.sources[kernel]);
        let made = match (&product.meaning, &nest.meaning) {
            (Meaning::Product(product), Meaning::Nest(nest)) => {
                product.with_tail(nest, pair.given, pair.beside, &format!("kernel{number}")).map_err(Error::device)?
            }
            _ => None,
        };
        // What a launch of the nest gets besides operands it gets too.
        let made = made.filter(|source: &Source| source.parameters == nest.parameters);
        let kernel = made.map(|source| {
            self.add(source, pair.product, 2);
            number
        });
        self.tails.insert(pair, kernel);
        Ok(kernel)
    }

    /// The same for the same product and nest in every program.
    pub(super) fn name_of(&self, pair: Pair) -> String {
        let [product, nest] = [pair.product, pair.nest].map(|kernel| &self.sources[kernel].meaning);
        let text = format!("{product:?} {nest:?} {} {:?}", pair.given, pair.beside);
        blake3::hash(text.as_bytes()).to_hex().to_string()
    }

    /// What kernel `kernel` was made of, if it is a product with a tail.
    pub(super) fn pair(&self, kernel: usize) -> Option<Pair> {
        self.tails.iter().find(|(_, made)| **made == Some(kernel)).map(|(pair, _)| *pair)
    }
}

/// Items in an order that means the same: `reader` says which one could be the tail of one before it, and `kernel` has the kernel of both, if
/// there is one.
fn paired<T>(
    kernels: &mut T,
    mut items: Vec<Item>,
    reader: impl Fn(&T, &[Item], usize) -> Option<(usize, Pair)>,
    kernel: impl Fn(&mut T, Pair) -> Result<Option<usize>>,
) -> Result<Vec<Item>> {
    let mut at = 0;
    while at < items.len() {
        let found = reader(kernels, &items, at).map(|(behind, pair)| {
            let between = &items[at + 1..behind];
            (behind, pair, [at, behind].map(|n| free(between, &items[n].unit)))
        });
        let Some((behind, pair, moves @ ([true, _] | [_, true]))) = found else {
            at += 1;
            continue;
        };
        let Some(kernel) = kernel(kernels, pair)? else {
            at += 1;
            continue;
        };
        let tail = Tail { kernel, pair };
        match moves {
            [true, _] => {
                let product = items.remove(at);
                items[behind - 1].join(product, tail);
            }
            _ => {
                let reader = items.remove(behind);
                let product = std::mem::replace(&mut items[at], reader);
                items[at].join(product, tail);
                at += 1;
            }
        }
    }
    Ok(items)
}

/// Whether nothing in between must stay in order with `unit`.
fn free(between: &[Item], unit: &Unit) -> bool {
    between.iter().all(|item| !item.unit.conflicts(unit))
}

impl Item {
    /// Becomes the tail of `product`: what touches its result stays in order with both.
    fn join(&mut self, product: Item, tail: Tail) {
        self.unit.reads.extend(product.unit.reads);
        self.unit.writes.extend(product.unit.writes);
        self.unit.joins = None;
        self.members.insert(0, product.members.into_iter().next().expect("it is one call"));
        self.tail = Some(tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An item of call `call` that reads and writes bytes of one block.
    fn item(call: usize, reads: &[usize], writes: &[usize]) -> Item {
        let spans = |all: &[usize]| all.iter().map(|&offset| Span { block: 1, offset, bytes: 1 }).collect();
        let unit = Unit { reads: spans(reads), writes: spans(writes), joins: None };
        Item { unit, members: vec![Member { call, launches: 0..1, workspace: 0 }], tail: None }
    }

    /// The first that reads what an item with a single result writes is its tail.
    fn first_reader(_: &usize, items: &[Item], at: usize) -> Option<(usize, Pair)> {
        let ([_], [result]) = (&items[at].members[..], &items[at].unit.writes[..]) else { return None };
        let behind =
            (at + 1..items.len()).find(|&n| items[n].unit.reads.contains(result) || items[n].unit.writes.contains(result));
        let single = behind.filter(|&n| items[n].members.len() == 1 && items[n].unit.reads.contains(result));
        single.map(|behind| (behind, Pair { product: 0, nest: 1, given: 0, beside: Beside::Stored }))
    }

    fn order(items: Vec<Item>) -> Vec<Vec<usize>> {
        let mut made = 0;
        let paired = paired(&mut made, items, first_reader, |made, _| {
            *made += 1;
            Ok(Some(7))
        });
        let paired = paired.unwrap();
        let tails = paired.iter().filter(|item| item.tail.is_some()).count();
        assert_eq!(made, tails, "no kernel is made for nothing");
        paired.iter().map(|item| item.members.iter().map(|member| member.call).collect()).collect()
    }

    #[test]
    fn a_product_joins_its_reader() {
        let product = || item(0, &[1, 2], &[3]);
        let other = |n: usize| item(n, &[8], &[9, 10]);
        assert_eq!(order(vec![product(), other(1), item(2, &[3], &[4])]), [vec![1], vec![0, 2]]);
        // In between an operand of the product is overwritten: the reader comes forward.
        assert_eq!(order(vec![product(), item(1, &[8], &[2, 9]), item(2, &[3], &[4])]), [vec![0, 2], vec![1]]);
        // It cannot either where it needs what is made in between.
        assert_eq!(order(vec![product(), item(1, &[8], &[2, 9]), item(2, &[3, 9], &[4])]), [[0], [1], [2]]);
        assert_eq!(order(vec![product(), item(1, &[8], &[3, 9]), item(2, &[3], &[4])]), [[0], [1], [2]], "of another's result");
    }

    #[test]
    fn what_conflicts_stays_in_order() {
        let mut state = 1;
        let mut below = |n: usize| {
            state = u64::wrapping_mul(state, 6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let mut pairs = 0;
        for _ in 0..300 {
            let mut one = |call| {
                let reads: Vec<usize> = (0..below(3) + 1).map(|_| below(12)).collect();
                let writes: Vec<usize> = (0..below(2) + 1).map(|_| below(12)).collect();
                item(call, &reads, &writes)
            };
            let items: Vec<Item> = (0..12).map(&mut one).collect();
            let units: Vec<Unit> = items.iter().map(|item| item.unit.clone()).collect();
            let found = order(items);
            pairs += found.iter().filter(|members| members.len() == 2).count();
            let flat = found.concat();
            let place = |call: usize| flat.iter().position(|other| *other == call).expect("a place");
            for n in 0..units.len() {
                assert!((0..n).all(|m| !units[m].conflicts(&units[n]) || place(m) < place(n)), "{n} of {units:?}: {found:?}");
            }
        }
        assert!(pairs > 300, "{pairs}");
    }
}
