//! The gate: sound programs pass, each planted fault is refused by the message that fits it.

use dcc_program::check::{CheckError, Fault, may_replace, programs};
use dcc_program::program::{Action, MOST_TENSORS};
use dcc_program::text::parse;

const MLP: &str = include_str!("programs/mlp_tp2.txt");
const PIPE: [&str; 2] = [include_str!("programs/pipe_stage0.txt"), include_str!("programs/pipe_stage1.txt")];

fn check(texts: &[&str]) -> Result<(), CheckError> {
    let parsed: Vec<_> = texts
        .iter()
        .map(|t| parse(t).unwrap_or_else(|e| panic!("{e}: {}", t.lines().nth(e.line as usize - 1).unwrap_or_default())))
        .collect();
    programs(&parsed)
}

#[test]
fn sound_programs_pass() {
    check(&[MLP]).unwrap();
    check(&PIPE).unwrap();
}

/// One line of the table: the fault, edits of a text, what the message says.
fn refused(fault: Fault, says: &str, texts: &[&str], edits: &[(usize, &str, &str)]) {
    let mut texts: Vec<String> = texts.iter().map(|t| (*t).to_owned()).collect();
    for (stage, from, to) in edits {
        assert!(texts[*stage].contains(from), "nothing to edit: {from}");
        texts[*stage] = texts[*stage].replacen(from, to, 1);
    }
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    match check(&texts) {
        Ok(()) => panic!("accepted: {edits:?}"),
        Err(e) => assert!(e.code == fault && e.to_string().contains(says), "{edits:?}\ngives {:?}: {e}", e.code),
    }
}

fn mlp(fault: Fault, says: &str, from: &str, to: &str) {
    refused(fault, says, &[MLP], &[(0, from, to)]);
}

#[test]
fn partial_results_are_not_read_as_whole() {
    // A dropped all_reduce: its result is the partial sum itself.
    let dropped =
        "t0 = start all_reduce.sum(tp) b10\nb11 f32[8/mb, 3] @s0 = wait t0\nb7, b12 f32[8/mb, 3] @m1+96 = fused.1 b11, b3";
    let read = "b11 f32[8/mb, 3]+tp @s0 = copy b10\nb7, b12 f32[8/mb, 3] @m1+96 = fused.1 b11, b3";
    mlp(Fault::Pending, "one that is whole", dropped, read);
    mlp(Fault::Pending, "declared as", "b10 f32[8/mb, 3]+tp @s0", "b10 f32[8/mb, 3] @s0");
    mlp(Fault::Pending, "declared as f32[4, 6/tp]", "b5 f32[4, 6/tp]+mb @p84 = zero", "b5 f32[4, 6/tp] @p84 = zero");
    mlp(Fault::Pending, "reads a partial", "fused.1 b11, b3  # mse", "fused.1 b11, b3\nb19 f32[8/mb, 3] @s48 = fused.0 b10");
    // A nonlinear function of a partial sum, and a product of two.
    mlp(
        Fault::Pending,
        "+tp",
        "t0 = start all_reduce.sum(tp) b10",
        "b19 f32[8/mb, 3]+tp @s48 = fused.0 b10\nt0 = start all_reduce.sum(tp) b10",
    );
    mlp(Fault::Pending, "operands [0, 1]", "t0 = start", "b19 f32[3, 3]+tp @s48 = dot(m j, m k -> j k) b10, b10\nt0 = start");
}

#[test]
fn collectives_fit_their_operands() {
    mlp(Fault::Sharding, "taken twice", "t0 = start all_reduce.sum(tp) b10", "t0 = start all_reduce.sum(tp) b9");
    mlp(Fault::Sharding, "taken twice", "all_reduce.sum(tp) b10", "all_reduce.max(tp) b10");
    mlp(Fault::Sharding, "no axis that ranks communicate", "all_reduce.sum(tp) b10", "all_reduce.sum(mb) b10");
    mlp(Fault::Declared, "declared as", "all_reduce.sum(tp) b10", "reduce_scatter(tp, dim 1) b10");
    mlp(Fault::Sharding, "not the last axis", "all_reduce.sum(tp) b10", "all_gather(tp, dim 0) b10");
    mlp(Fault::Sharding, "there is no dim 7", "all_reduce.sum(tp) b10", "reduce_scatter(tp, dim 7) b10");
    mlp(
        Fault::Unwaited,
        "t0 is started, but nothing waits for it",
        "b11 f32[8/mb, 3] @s0 = wait t0",
        "b11 f32[8/mb, 3] @s0 = zero",
    );
    mlp(
        Fault::InFlight,
        "b10 is read while t0 is in flight",
        "b11 f32[8/mb, 3] @s0 = wait t0",
        "t0 = start all_reduce.sum(tp) b10\nb11 f32[8/mb, 3] @s0 = wait t0",
    );
}

#[test]
fn types_follow_from_operands() {
    mlp(
        Fault::Sharding,
        "factor m is sharded over nothing and over mb",
        "b6 += dot(m k, m n -> k n) b9, b13",
        "b6 += dot(m k, m n -> k n) b9, b13\nb19 f32[8, 1] @s48 = zero\nb20 f32[1, 3] @s80 = dot(m k, m n -> k n) b19, b13",
    );
    mlp(
        Fault::Sharding,
        "axis tp is on two factors",
        "t0 = start",
        "b19 f32[6/tp, 6] @m1+0 = dot(m j, m k -> j k) b9, b9\nt0 = start",
    );
    mlp(Fault::Type, "factor", "dot(m k, k n -> m n) b2, b0", "dot(k m, k n -> m n) b2, b0");
    mlp(Fault::Declared, "declared as f32[8/mb, 6]", "b8 f32[8/mb, 6/tp] @m1+0", "b8 f32[8/mb, 6] @m1+0");
    mlp(Fault::Declared, "declared as f64", "b14 f32[8/mb, 6/tp] @s48", "b14 f64[8/mb, 6/tp] @s0");
    mlp(Fault::Type, "dim i of the kernel is", "fused.1 b11, b3", "fused.1 b11, b1");
    mlp(Fault::Kernel, "reduces over the outer dim i", "outer()", "outer(i)");
    mlp(Fault::Type, "the kernel takes f32 of rank 2", "b0 = fused.4 b0, b16, b4", "b0 = fused.4 b0, b4, b4");
    mlp(Fault::Kernel, "the value stored is bool", "max(x0[i, j], 0.0:f32)", "gt(x0[i, j], 0.0:f32)");
    mlp(Fault::Kernel, "0 of 24 points", "  y0[i, j] = x0[i, j] * 0.08", "  v0 = x0[i, j] * 0.08");
}

const WINDOWS: &str = "\
program windows eval stage 0/1 mesh(mb=1, tp=2)
memory persistent=4096 scratch=4096
param b0 f32[4/tp, 6, 9] @p0 weight x
param b1 f32[5, 6, 3] @p1024 weight kernel
param b2 f32[4/tp, 5, 5] @p2048 weight dy
output b3 y
output b4 dx
output b6 dk
output b7 max
output b8 place
section forward
b3 f32[4/tp, 5, 5] @s0 = convolution(n c x, o c k -> n o y; x = 2 y + 1 k - 1) b0, b1
b4 f32[4/tp, 6, 9] @s512 = convolution(n o y, o c k -> n c x; x = 2 y + 1 k - 1) b2, b1
b5 f32[5, 6, 3]+tp @s1536 = convolution(n c x, n o y -> o c k; x = 2 y + 1 k - 1) b0, b2
t0 = start all_reduce.sum(tp) b5
b6 f32[5, 6, 3] @s2048 = wait t0
b7 f32[4/tp, 6, 4] @s2560, b8 i32[4/tp, 6, 4] @s3072 = max_pool(n c x -> n c y; 9 -> 4 taps 3 stride 2 dilation 1 pad 0) b0
order forward 0
";

#[test]
fn windows_move_along_whole_dims() {
    check(&[WINDOWS]).unwrap();
    let wrong = |fault, says: &str, from: &str, to: &str| refused(fault, says, &[WINDOWS], &[(0, from, to)]);
    wrong(Fault::Sharding, "factor x of a window is sharded over tp", "b0 f32[4/tp, 6, 9]", "b0 f32[4, 6, 9/tp]");
    wrong(Fault::Sharding, "factor c is sharded over", "b0 f32[4/tp, 6, 9]", "b0 f32[4, 6/tp, 9]");
    wrong(Fault::Declared, "the result is f32[4/tp", "b3 f32[4/tp, 5, 5]", "b3 f32[4, 5/tp, 5]");
    wrong(Fault::Type, "factor o is", "b3 f32[4/tp, 5, 5]", "b3 f32[4/tp, 6, 5]");
    wrong(Fault::Pending, "declared as", "b5 f32[5, 6, 3]+tp", "b5 f32[5, 6, 3]");
    wrong(Fault::Malformed, "unknown factor z", "x = 2 y", "z = 2 y");
    wrong(Fault::Malformed, "in two places", "x = 2 y + 1 k", "x = 2 y + 1 y");
    wrong(Fault::Malformed, "does not move", "x = 2 y", "x = 0 y");
    wrong(Fault::Type, "factor k is in 2 tensors", "n c x, o c k -> n o y; ", "n k x, o k c -> n o y; ");
    wrong(Fault::Type, "are not 9 and 4 elements", "9 -> 4 taps", "9 -> 5 taps");
    wrong(Fault::Type, "are not 9 and 4 elements", "9 -> 4 taps", "3 -> 4 taps");
    wrong(Fault::Declared, "the result is i32", "b8 i32[4/tp, 6, 4]", "b8 i64[4/tp, 6, 4]");
}

const HALVES: &str = "\
program halves eval stage 0/1 mesh(mb=1, tp=2)
memory persistent=256 scratch=1024
param b0 bf16[8, 6/tp] @p0 weight a
param b1 bf16[6/tp, 4] @p64 weight b
output b4 y
section forward
b2 bf16[8, 4]+tp @s0 = dot(m k, k n -> m n) b0, b1
b3 f32[8, 4]+tp @s256 = fused.0 b2
t0 = start all_reduce.sum(tp) b3
b4 f32[8, 4] @s512 = wait t0
order forward 0
kernel fused.0(x0: bf16[_, _]) -> (y0: f32[_, _]) dims(i, j) outer(i, j)
  y0[i, j] = f32(x0[i, j])
";

const SEVERAL: &str = "program several eval stage 0/1 mesh(tp=2)
memory persistent=80 scratch=256
param b0 f32[8/tp] @p0 weight a
param b1 f32[4/tp] @p64 weight b
output b4 y
section forward
t0 = start all_gather(tp, dim 0) b0, b1
b2 f32[8] @s0, b3 f32[4] @s64 = wait t0
b4 f32[] @s128 = fused.0 b2, b3
order forward 0
kernel fused.0(x0: f32[_], x1: f32[_]) -> (y0: f32[]) dims(i, j) outer()
  v0 = sum i: x0[i]
  v1 = sum j: x1[j]
  y0[] = v0 * v1
";

#[test]
fn a_transfer_of_several_tensors_brings_each_to_its_place() {
    check(&[SEVERAL]).unwrap();
    let wrong = |fault, says: &str, from: &str, to: &str| refused(fault, says, &[SEVERAL], &[(0, from, to)]);
    let wait = "b2 f32[8] @s0, b3 f32[4] @s64 = wait t0";
    wrong(Fault::Malformed, "has 1 results, not 2", wait, "b2 f32[8] @s0 = wait t0\nb3 f32[4] @s64 = zero");
    wrong(Fault::Declared, "declared as", wait, "b3 f32[4] @s64, b2 f32[8] @s0 = wait t0");
    wrong(Fault::InPlace, "share memory", "b3 f32[4] @s64", "b3 f32[4] @s16");
    wrong(Fault::InPlace, "share memory", "b3 f32[4] @s64", "b3 f32[4] @p0");
    wrong(Fault::InFlight, "is read while t0", wait, &format!("b5 f32[4] @s192 = copy b3\n{wait}"));
    wrong(Fault::InFlight, "is written to while t0", wait, &format!("b3 = zero\n{wait}"));
    wrong(Fault::Unused, "nothing reads b3", "fused.0 b2, b3", "fused.0 b2, b2");
    let many = vec!["b0"; MOST_TENSORS + 1].join(", ");
    wrong(Fault::Malformed, "takes 32 operands", "b0, b1", &many);
}

/// A partial sum may be widened, and leave a product in f32; rounded it is another one.
#[test]
fn partial_sums_are_not_rounded() {
    check(&[HALVES]).unwrap();
    let narrow = HALVES.replace("b2 bf16[8, 4]+tp", "b2 f32[8, 4]+tp");
    let kept = narrow.replace("x0: bf16", "x0: f32").replace("f32(x0[i, j])", "x0[i, j]");
    check(&[&kept]).unwrap();
    let (from, to) = (
        "y0: f32[_, _]) dims(i, j) outer(i, j)\n  y0[i, j] = x0[i, j]",
        "y0: bf16[_, _]) dims(i, j) outer(i, j)\n  y0[i, j] = bf16(x0[i, j])",
    );
    let rounded = kept.replace("b3 f32", "b3 bf16").replace("b4 f32", "b4 bf16");
    refused(Fault::Pending, "`cast` reads a partial result (+tp) as whole", &[&rounded], &[(0, from, to)]);
    refused(Fault::Declared, "the result is bf16[8, 4]+tp", &[HALVES], &[(0, "b2 bf16[8, 4]+tp", "b2 f64[8, 4]+tp")]);
}

/// What is added to something stands beside it, not in its place.
#[test]
fn a_sum_is_no_operand_of_its_own() {
    let replaces = |text: &str| {
        let program = parse(text).expect("a program");
        let mut body = program.sections.iter().flat_map(|section| &section.body);
        let update = body.find(|instr| matches!(instr.action, Action::Kernel(4))).expect("an update");
        may_replace(&program, update, 0, 0)
    };
    assert!(replaces(MLP));
    assert!(!replaces(&MLP.replace("y0[i, j] = x0[i, j] - x2[]", "y0[i, j] += x0[i, j] - x2[]")));
}

#[test]
fn memory_is_not_shared() {
    mlp(Fault::Bounds, "do not fit", "scratch=96", "scratch=92");
    mlp(Fault::Bounds, "not aligned", "@s48 = dot", "@s46 = dot");
    mlp(Fault::InPlace, "share part", "b14 f32[8/mb, 6/tp] @s48", "b14 f32[8/mb, 6/tp] @s44");
    mlp(Fault::InPlace, "writes before all is read", "b14 f32[8/mb, 6/tp] @s48", "b14 f32[8/mb, 6/tp] @s0");
    mlp(Fault::Overwritten, "b9 has overwritten", "@m1+48 = fused.0 b8", "@m1+0 = fused.0 b8");
    mlp(
        Fault::Overwritten,
        "b17 has overwritten",
        "b17 f32[6/tp, 3] @p132 = resolve b6\n",
        "b17 f32[6/tp, 3] @p84 = copy b1\n",
    );
    mlp(Fault::Unwritten, "b13 is read before", "b13 f32[8/mb, 3] @s0 = fused.2 b12\n", "b13 f32[8/mb, 3] @s0 = fused.2 b13\n");
    mlp(Fault::Overwritten, "not intact", "param b1 f32[6/tp, 3] @p48", "param b1 f32[6/tp, 3] @p40");
    let dropped = "b10 f32[8/mb, 3]+tp @s0 = dot(m k, k n -> m n) b9, b1  # /fc2/MatMul\nt0 =";
    let text = MLP.replacen(dropped, "t0 =", 1).replacen("section begin", "buffer b10 f32[8/mb, 3]+tp @s0\nsection begin", 1);
    refused(Fault::Unwritten, "b10 is read before it is written", &[&text], &[]);
}

#[test]
fn microbatches_stay_apart() {
    let update = "section update\n";
    let before_update = |lines: &str| format!("{lines}\nsection update\n");
    let in_update = |lines: &str| format!("section update\n{lines}\n");
    let early = "section update\nb16 f32[4, 6/tp] @p84 = resolve b5\n";
    mlp(Fault::Accumulator, "1 of 2 microbatches", early, &before_update("b16 f32[4, 6/tp] @p84 = resolve b5"));
    // The zeroing of an accumulator lost, or done for each microbatch.
    let zero = "b5 f32[4, 6/tp]+mb @p84 = zero\n";
    let lost = MLP.replacen(zero, "", 1).replacen("section begin\n", "buffer b5 f32[4, 6/tp]+mb @p84\nsection begin\n", 1);
    refused(Fault::Accumulator, "nothing has zeroed", &[&lost], &[]);
    let each = MLP.replacen(zero, "", 1).replacen("section forward\n", &format!("section forward\n{zero}"), 1);
    refused(Fault::Accumulator, "1 of 2", &[&each], &[]);
    mlp(Fault::Accumulator, "only resolve may", update, &before_update("b19 f32[]+mb @s0 = copy b7"));
    let sent = in_update("t7 = start send(to 1) b5\nwait t7");
    refused(Fault::Microbatch, "belongs to no microbatch", &PIPE, &[(0, update, &sent)]);
    mlp(Fault::Microbatch, "runs once per step", update, &in_update("b19 f32[8/mb, 6/tp] @s0 = fused.0 b8"));
    // One slot for two microbatches in flight.
    let order = "forward 0; backward 0; forward 1; backward 1";
    mlp(Fault::Microbatch, "the value of microbatch 1", order, "forward 0; forward 1; backward 0; backward 1");
    let early =
        MLP.replacen("b1 = fused.4 b1, b17, b4  # sgd\n", "", 1).replacen(update, &before_update("b1 = fused.4 b1, b1, b4"), 1);
    refused(Fault::External, "outside of the update section", &[&early], &[]);
    mlp(Fault::External, "is updated 2 times", "b1 = fused.4", "b1 = fused.4 b1, b17, b4\nb1 = fused.4");
    let state = "memory persistent=180";
    let counted = MLP.replacen("memory persistent=176", state, 1).replacen(update, &before_update("b19 = fused.5 b19"), 1);
    let counted = counted.replacen("section forward", "b19 f32[] @p176 = zero\nsection forward", 1);
    let counted = counted + "kernel fused.5(x0: f32[]) -> (y0: f32[]) dims() outer()\n  y0[] = x0[] + 1.0:f32\n";
    refused(Fault::Microbatch, "changes with each microbatch", &[&counted], &[]);
}

#[test]
fn nothing_is_in_vain() {
    let idle = "b10 f32[8/mb, 3]+tp @s0";
    mlp(Fault::Unused, "nothing reads b19", idle, &format!("b19 f32[8/mb, 6/tp] @s48 = fused.0 b8\n{idle}"));
    let kept = "b12 f32[8/mb, 3] @m1+96 = fused.1";
    let again = "b13 f32[8/mb, 3] @s0 = fused.2 b12";
    assert!(MLP.contains(kept) && MLP.contains(again));
    mlp(Fault::Unused, "b12 is kept for backward", again, "b13 f32[8/mb, 3] @s0 = fused.2 b3");
    mlp(Fault::Accumulator, "what was added already", "b6 += dot", "b6 += dot(m k, m n -> k n) b9, b13\nb6 += dot");
}

#[test]
fn sections_run_when_they_must() {
    let order = "order begin; forward 0; backward 0; forward 1; backward 1; update";
    let wrong = |fault, says: &str, steps: &str| mlp(fault, says, order, steps);
    wrong(Fault::Order, "never runs", "order begin; forward 0; forward 1; backward 0; update");
    wrong(Fault::Order, "twice", "order begin; forward 0; backward 0; forward 1; backward 1; backward 1; update");
    wrong(Fault::Order, "after its backward", "order begin; backward 0; forward 0; forward 1; backward 1; update");
    wrong(Fault::Order, "begin runs after forward", "order forward 0; begin; backward 0; forward 1; backward 1; update");
    wrong(Fault::Order, "microbatch 2 of 2", "order begin; forward 0; backward 0; forward 1; backward 1; forward 2; update");
    wrong(Fault::Bounds, "slots", "order begin; forward 0 [1 0]; backward 0; forward 1; backward 1; update");
    wrong(Fault::Order, "update never runs", "order begin; forward 0; backward 0; forward 1; backward 1");
}

fn pipe(fault: Fault, says: &str, edits: &[(usize, &str, &str)]) {
    refused(fault, says, &PIPE, edits);
}

#[test]
fn stages_understand_each_other() {
    pipe(
        Fault::Unmatched,
        "sends 4, stage 1 receives 2",
        &[(0, "section backward\n", "section backward\nt7 = start send(to 1) b5\nwait t7\n")],
    );
    pipe(
        Fault::Unmatched,
        "f32[8/mb, 5]",
        &[(1, "t1 = start send(to 0) b9", "b12 f32[8/mb, 5] @s48 = zero\nt1 = start send(to 0) b12")],
    );
    pipe(
        Fault::Unmatched,
        "of microbatch 1",
        &[(1, "forward 0; backward 0; forward 1; backward 1", "forward 1; backward 1; forward 0; backward 0")],
    );
    pipe(Fault::Malformed, "exchanges with stage 5", &[(0, "send(to 1)", "send(to 5)")]);
    pipe(Fault::Malformed, "exchanges with stage 0", &[(0, "send(to 1)", "send(to 0)")]);
    pipe(Fault::Mesh, "2 programs for 3 stages", &[(0, "mesh(mb=2, pp=2)", "mesh(mb=2, pp=3)")]);
    pipe(Fault::Mesh, "another mesh", &[(1, "mesh(mb=2, pp=2)", "mesh(mb=4, pp=2)")]);
    pipe(Fault::Mesh, "stage 0/2", &[(1, "stage 1/2", "stage 0/2")]);
    // One slot for two microbatches in flight, or the slot of another one.
    pipe(Fault::InFlight, "is in flight", &[(0, "forward 1 [1]", "forward 1")]);
    pipe(Fault::Microbatch, "microbatch 1", &[(0, "backward 0; backward 1 [1]", "backward 0 [1]; backward 1")]);
}

#[test]
fn transfers_are_left_alone() {
    let send = "t0 = start send(to 1) b5\n";
    pipe(
        Fault::InFlight,
        "b5 is written to while t0 is in flight",
        &[(0, send, "t0 = start send(to 1) b5\nb5 = fused.0 b4\n")],
    );
    let receive = "t1 = start recv(from 1)\nb6 f32[8/mb, 6] @s0 = wait t1\n";
    let early = "t1 = start recv(from 1)\nb9 f32[8/mb, 6] @s0 = fused.0 b4\nb6 f32[8/mb, 6] @s0 = wait t1\n";
    pipe(Fault::InFlight, "b9 is written to while t1 is in flight", &[(0, receive, early)]);
    pipe(Fault::InFlight, "uses scratch beyond", &[(1, "wait t1\nsection update\n", "section update\nwait t1\n")]);
    let wait = "b11 f32[8/mb, 3] @s0 = wait t0\n";
    mlp(Fault::InFlight, "b19 is written to while t0", wait, &format!("b19 f32[8/mb, 3] @s0 = copy b3\n{wait}"));
    let unwaited = [(0, "wait t0\n", "")];
    pipe(Fault::Unwaited, "nothing waits", &unwaited);
}

#[test]
fn nobody_waits_for_ever() {
    // Stage 0 waits for its send of microbatch 0 before it starts the send of 1; stage 1 first receives the gradient … of
    // which stage 0 knows only after its own wait.
    let receive = "wait t0\nt1 = start recv(from 1)\nb6 f32[8/mb, 6] @s0 = wait t1\n";
    let late = [
        (
            0,
            "t0 = start send(to 1) b5\nsection backward\nwait t0\nt1 = start recv(from 1)\n",
            "section backward\nt1 = start recv(from 1)\n",
        ),
        (0, "b6 f32[8/mb, 6] @s0 = wait t1\n", "b6 f32[8/mb, 6] @s0 = wait t1\nt0 = start send(to 1) b5\nwait t0\n"),
    ];
    assert!(PIPE[0].contains(receive));
    pipe(Fault::Deadlock, "waits in a circle: stage 0 in backward of microbatch 0", &late);
}
