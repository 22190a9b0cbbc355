//! Products and the elementwise kernels that read their results first: the two as one, which reads no result, and writes none that nobody
//! else reads.

use super::device::{Call, Texts};
use super::groups::{Member, Unit};
use crate::error::{Error, Result};
use crate::exec::Span;
use dcc_kernels::Nest;
use dcc_kernels::cuda::library::product::Product;
use dcc_kernels::cuda::{Meaning, Source};
use std::sync::Arc;

/// Members of a row, as far as their order is concerned, that run as one.
pub(super) struct Item {
    pub unit: Unit,
    pub members: Vec<Member>,
    /// The kernel of a product, the first member, with its tail, the second.
    pub tail: Option<usize>,
}

/// A product and the kernel behind it: which kernels, and which of the second one's inputs is the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Pair {
    pub product: usize,
    pub nest: usize,
    pub given: usize,
    /// Others read the result too.
    pub keeps: bool,
}

/// A product with its tail, as others can make it.
pub struct Tailed {
    pub product: Arc<Product>,
    pub nest: Arc<Nest>,
    /// Which of the nest's inputs is the result.
    pub given: usize,
    pub keeps: bool,
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
                    Some(Tailed { product, nest, given: pair.given, keeps: pair.keeps, origin })
                }
                _ => None,
            }
        };
        self.tails.iter().filter_map(one).collect()
    }

    /// Makes one of products and the kernels behind them, as far as that changes the order of nothing that must stay in order.
    pub(super) fn with_tails(&mut self, calls: &[&Call], units: Vec<(Unit, Member)>) -> Result<Vec<Item>> {
        let item = |(unit, member)| Item { unit, members: vec![member], tail: None };
        let items = paired(units.into_iter().map(item).collect(), |items, at| self.tail_of(calls, items, at))?;
        for item in &items {
            if let (Some(kernel), [product, _]) = (item.tail, &item.members[..]) {
                calls[product.call].tail.set(Some(kernel));
            }
        }
        Ok(items)
    }

    /// The place of the item that can be the tail of the one at `at`, and the kernel of both. Errors: more blocks than a grid has.
    fn tail_of(&mut self, calls: &[&Call], items: &[Item], at: usize) -> Result<Option<(usize, usize)>> {
        let [member] = &items[at].members[..] else { return Ok(None) };
        let product = calls[member.call];
        let (Meaning::Product(_), [lhs, rhs, result]) = (&self.sources[product.kernel].meaning, &product.operands[..]) else {
            return Ok(None);
        };
        let keeps = !product.is_passed_on;
        let touches = |item: &Item| item.unit.reads.iter().chain(&item.unit.writes).any(|span| span.overlaps(result));
        let Some(behind) = (at + 1..items.len()).find(|&n| touches(&items[n])) else { return Ok(None) };
        let [tail] = &items[behind].members[..] else { return Ok(None) };
        let nest = calls[tail.call];
        let (reads, writes) = nest.operands.split_at(nest.reads);
        let mut given = (0..reads.len()).filter(|&n| reads[n].overlaps(result));
        // Blocks of the product read its operands while others are done.
        let lost = |span: &Span| span.overlaps(lhs) || span.overlaps(rhs) || keeps && span.overlaps(result);
        let (Some(given), None, false) = (given.next(), given.next(), writes.iter().any(lost)) else { return Ok(None) };
        if reads[given] != *result {
            return Ok(None);
        }
        let pair = Pair { product: product.kernel, nest: nest.kernel, given, keeps };
        Ok(self.with_tail(pair)?.map(|kernel| (behind, kernel)))
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
                product.with_tail(nest, pair.given, pair.keeps, &format!("kernel{number}")).map_err(Error::device)?
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

    /// What kernel `kernel` was made of, if it is a product with a tail.
    pub(super) fn pair(&self, kernel: usize) -> Option<Pair> {
        self.tails.iter().find(|(_, made)| **made == Some(kernel)).map(|(pair, _)| *pair)
    }
}

/// Items in an order that means the same, where `tail_of` says which one can be the tail of one before it, and by which kernel.
fn paired(
    mut items: Vec<Item>,
    mut tail_of: impl FnMut(&[Item], usize) -> Result<Option<(usize, usize)>>,
) -> Result<Vec<Item>> {
    let mut at = 0;
    while at < items.len() {
        match tail_of(&items, at)? {
            Some((behind, kernel)) if free(&items[at + 1..behind], &items[at].unit) => {
                let product = items.remove(at);
                items[behind - 1].follow(product, kernel);
            }
            Some((behind, kernel)) if free(&items[at + 1..behind], &items[behind].unit) => {
                let mut tail = items.remove(behind);
                std::mem::swap(&mut tail, &mut items[at]);
                items[at].follow(tail, kernel);
                at += 1;
            }
            _ => at += 1,
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
    fn follow(&mut self, product: Item, kernel: usize) {
        self.unit.reads.extend(product.unit.reads);
        self.unit.writes.extend(product.unit.writes);
        self.unit.joins = None;
        self.members.insert(0, product.members.into_iter().next().expect("it is one call"));
        self.tail = Some(kernel);
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
    fn first_reader(items: &[Item], at: usize) -> Result<Option<(usize, usize)>> {
        let ([_], [result]) = (&items[at].members[..], &items[at].unit.writes[..]) else { return Ok(None) };
        let behind =
            (at + 1..items.len()).find(|&n| items[n].unit.reads.contains(result) || items[n].unit.writes.contains(result));
        let single = behind.filter(|&n| items[n].members.len() == 1 && items[n].unit.reads.contains(result));
        Ok(single.map(|behind| (behind, 7)))
    }

    fn order(items: Vec<Item>) -> Vec<Vec<usize>> {
        let paired = paired(items, first_reader).unwrap();
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
