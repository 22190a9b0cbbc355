//! What given choices cost, value by value: the definition that the solver's sums must meet, and the collectives in it.

use super::super::forward::Forward;
use super::super::pins::Pins;
use super::super::{Parallel, Plan};
use super::frontier::with_kept;
use super::layout::{At, Layout};
use super::model::{Along, Class, Cost, Item, Problem};
use super::planned;
use crate::cost::reshard::{self, Move, Step};
use crate::error::Result;
use crate::graph::{Graph, NodeId};
use dcc_program::Reduce;
use dcc_program::program::SectionKind;
use std::collections::{BTreeMap, BTreeSet};

/// One collective over tensor axes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Collective {
    /// The value that is moved, or whose gradient is.
    pub of: NodeId,
    pub step: Step,
    /// `Forward` and `Backward` happen per microbatch, `Begin` and `Update` once per step.
    pub section: SectionKind,
}

/// The plan of a graph and the collectives over tensor axes that its solution counts with.
pub(in super::super) fn solved(graph: &Graph, options: &Parallel) -> Result<(Plan, Vec<Collective>)> {
    let forward = Forward::of(graph);
    let along = if options.sequence_parallel { Along::Sequence } else { Along::Features };
    let solution = super::solve(&forward, options, Pins::of(graph, options)?, along, 1)?;
    let solved = &solution.found[0];
    let account = account(&solution.problem, &solved.choices).expect("the solver's choices fit together");
    assert_eq!((account.cost, account.more), (solved.cost, solved.more), "the parts add up");
    Ok((planned(&solution.plan, &solution.problem, solved), account.collectives))
}

#[derive(Debug)]
pub(super) struct Account {
    pub cost: Cost,
    /// Bytes beyond those of the choices that need least.
    pub more: u64,
    pub collectives: Vec<Collective>,
}

/// By value: the distinct wanted layouts (true: gathered again in the backward), and the distinct contributions.
#[derive(Default)]
struct Uses {
    wants: BTreeMap<Layout, bool>,
    gives: BTreeSet<Layout>,
}

/// `None` where a choice keeps what is not pending.
pub(super) fn account(problem: &Problem, choices: &[usize]) -> Option<Account> {
    let mut layouts: Vec<Layout> = Vec::new();
    let mut uses: Vec<Uses> = problem.items.iter().map(|_| Uses::default()).collect();
    let (mut cost, mut more) = (0, 0);
    for (item, &choice) in problem.items.iter().zip(choices) {
        let class = &problem.classes[item.class];
        let choice = &class.choices[choice];
        let mut kept: Vec<(u8, &[usize])> = Vec::new();
        for &axis in &choice.keep {
            let pending = |operand: usize| {
                let read = class.reads.iter().position(|read| read.operand == Some(operand as u8));
                read.is_some_and(|read| layouts[item.values[read]].is_pending_sum(usize::from(axis)))
            };
            match class.linear.iter().find(|set| set.iter().all(|&o| pending(o))) {
                Some(set) => kept.push((axis, set)),
                None if class.scalar => {}
                None => return None,
            }
        }
        for (i, (read, &value)) in class.reads.iter().zip(&item.values).enumerate() {
            let (want, give) = with_kept(choice, i, read.operand, &kept);
            *uses[value].wants.entry(want).or_default() |= read.again;
            if read.gradient {
                uses[value].gives.insert(give);
            }
        }
        let mut makes = choice.makes;
        kept.iter().for_each(|&(axis, _)| makes.set(usize::from(axis), At::Pending(Reduce::Sum)));
        layouts.push(makes);
        cost += choice.cost;
        more += choice.bytes - class.least();
    }
    let mut account = Account { cost, more, collectives: Vec::new() };
    for ((item, uses), layout) in problem.items.iter().zip(&uses).zip(layouts) {
        account.add(problem, item, uses, layout);
    }
    Some(account)
}

impl Account {
    fn add(&mut self, problem: &Problem, item: &Item, uses: &Uses, layout: Layout) {
        let class = &problem.classes[item.class];
        let per_step = problem.kinds[class.kind].per_step;
        for (&want, &again) in &uses.wants {
            let moving = problem.moving(class.kind, layout, want);
            self.cost += problem.want_cost(class.kind, moving, again);
            let forward = if per_step { SectionKind::Begin } else { SectionKind::Forward };
            self.list(problem, item, layout, want, |_| Some(forward));
            if again && !per_step {
                let gathers = |step: &Step| (step.kind == Move::AllGather).then_some(SectionKind::Backward);
                self.list(problem, item, layout.resolved(), want.resolved(), gathers);
            }
        }
        for &give in &uses.gives {
            self.cost += problem.give_cost(class.kind, problem.moving(class.kind, give, layout.resolved()));
            let late = |step: &Step| per_step && step.kind.is_reduction();
            let section = |step: &Step| Some(if late(step) { SectionKind::Update } else { SectionKind::Backward });
            self.list(problem, item, give, layout.resolved(), section);
        }
        if class.output {
            let moving = problem.moving(class.kind, layout, layout.resolved());
            self.cost += problem.want_cost(class.kind, moving, false);
            self.list(problem, item, layout, layout.resolved(), |_| Some(SectionKind::Update));
        }
    }

    /// The steps that happen in a section.
    fn list(
        &mut self,
        problem: &Problem,
        item: &Item,
        from: Layout,
        to: Layout,
        section: impl Fn(&Step) -> Option<SectionKind>,
    ) {
        let class: &Class = &problem.classes[item.class];
        let kind = &problem.kinds[class.kind];
        let ty = kind.ty.with_sharding(from.over(&kind.ty.sharding, &problem.axes));
        for step in reshard::steps(&ty, &to.over(&kind.ty.sharding, &problem.axes), &problem.mesh) {
            if let Some(section) = section(&step) {
                self.collectives.push(Collective { of: item.id, step, section });
            }
        }
    }
}
