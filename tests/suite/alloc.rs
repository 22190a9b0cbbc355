//! A counting allocator: from the second step on, a rank's thread allocates nothing.

use crate::ranks;
use dcc::compile::Precision;
use dcc_runtime::comm::Patience;
use dcc_runtime::exec::ranks::local_ranks;
use dcc_runtime::exec::{Executor, Fresh, Io, Scalars, World};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    /// Allocations of this thread.
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator does all the work; counting touches nothing of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that ends has no counter any more.
        let _ = COUNT.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations() -> u64 {
    COUNT.with(|count| count.get())
}

/// Allocations of each rank in each of four steps.
fn counts(model: &'static str, (dp, tp, pp): (u32, u32, u32), precision: Precision) -> Vec<Vec<u64>> {
    let artifact = ranks::compiled(model, &ranks::mesh(dp, tp, pp), 2, precision).artifact;
    let world = World::new(&[&artifact.train]).unwrap();
    let counts = local_ranks(&world, 1, Patience::default(), |rank| {
        let program = &artifact.train[rank.world.stage(rank.rank) as usize];
        let mut executor = Executor::new(&mut rank.cpu, rank.world, program, rank.rank, Fresh::AsIs)?;
        let mut counts = Vec::with_capacity(8);
        for step in 1..=4 {
            let before = allocations();
            let mut io = Io {
                fill: &mut |_, _, bytes| {
                    bytes.fill(0);
                    Ok(())
                },
                take: &mut |_, _, _| Ok(()),
            };
            let scalars = Scalars { learning_rate: 0.0, step, seed: 0 };
            executor.step(&mut rank.cpu, &mut rank.comm, &scalars, &mut io, None)?;
            counts.push(allocations() - before);
        }
        Ok(counts)
    });
    counts.unwrap()
}

#[test]
fn steps_allocate_nothing() {
    let cases = [
        ("gpt2_tiny.onnx", (1, 2, 2), Precision::AsExported),
        ("gpt2_tiny.onnx", (2, 1, 1), Precision::F64),
        ("gpt2_tiny_dropout.onnx", (1, 1, 1), Precision::AsExported),
        ("mlp.onnx", (2, 2, 1), Precision::AsExported),
        ("mlp.onnx", (1, 1, 2), Precision::F64),
    ];
    for (model, mesh, precision) in cases {
        for (rank, counts) in counts(model, mesh, precision).iter().enumerate() {
            assert_eq!(counts[1..], [0, 0, 0], "{model} {mesh:?} {precision:?} rank {rank}: {counts:?}");
        }
    }
    let before = allocations();
    drop(Box::new(std::hint::black_box(7)));
    assert_eq!(allocations() - before, 1, "the control");
}
