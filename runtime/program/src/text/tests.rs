//! Round trips of what `print` can meet, and what the parser says of texts that are wrong.

use super::{parse, print};
use crate::kernel::*;
use crate::program::*;
use crate::types::{DType, Reduce};

const MLP: &str = include_str!("../../tests/programs/mlp_tp2.txt");

#[test]
fn mlp_round_trips() {
    let p = parse(MLP).unwrap();
    assert_eq!(print(&p), MLP);
    assert_eq!(parse(&print(&p)).unwrap(), p);
}

#[test]
fn names_and_origins_take_any_characters() {
    let mut p = parse(MLP).unwrap();
    for name in ["", " ", "a b#c", "\"", "\\", "tab\t new\nline \u{7f}\u{85}", "é/ü", "weight", "0"] {
        p.name = name.to_owned();
        p.params[0].name = name.to_owned();
        p.params[1].kind = ParamKind::State(name.to_owned());
        p.inputs[0].name = name.to_owned();
        p.outputs[0].name = name.to_owned();
        p.sections[1].body[0].origin = name.to_owned();
        assert_eq!(parse(&print(&p)).as_ref(), Ok(&p), "{name:?}");
    }
}

#[test]
fn long_orders_stay_short() {
    let mut p = parse(MLP).unwrap();
    let steps = |section: u32, slots: [u32; 2]| {
        (0..100_000).map(move |m| Step { section, microbatch: m, slots: slots.iter().copied().collect() })
    };
    p.order = steps(1, [0, 0]).chain(steps(2, [0, 3])).collect();
    let text = print(&p);
    assert!(text.contains("order forward 0..100000; backward 0..100000 [0 3]\n"), "{text}");
    assert_eq!(parse(&text).unwrap(), p);
}

/// Numbers that look random, the same on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }

    fn index(&mut self, exprs: u64) -> Index {
        match self.below(if exprs > 0 { 4 } else { 3 }) {
            0 | 1 => Index::Dim(DimId(self.below(3) as u8)),
            2 => {
                let terms = (0..self.below(3)).map(|d| (DimId(d as u8), self.below(9) as i64 - 4)).collect();
                Index::Affine { terms, offset: [0, -7, 5, i64::MIN, i64::MAX][self.below(5) as usize] }
            }
            _ => Index::Expr(ExprId(self.below(exprs) as u32)),
        }
    }

    fn expr(&mut self, exprs: u64) -> Expr {
        let dtype = DType::ALL[self.below(13) as usize];
        let mut id = || ExprId(self.below(exprs.max(1)) as u32);
        let (a, b, c) = (id(), id(), id());
        match self.below(if exprs == 0 { 4 } else { 11 }) {
            0 => {
                let index = (0..self.below(3)).map(|_| self.index(exprs)).collect();
                let outside = if self.below(2) == 0 { Outside::Zero } else { Outside::Never };
                Expr::Load { input: self.below(3) as u8, index, outside }
            }
            1 => Expr::Var(VarId(self.below(4) as u32)),
            2 => {
                let floats = [0.0, -0.0, 0.1, 1e300, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, -f64::NAN, f64::MIN_POSITIVE];
                let bits =
                    if dtype.is_float() { floats[self.below(9) as usize].to_bits() } else { self.below(3).wrapping_sub(1) };
                Expr::Const { dtype, bits }
            }
            3 => Expr::Position(DimId(self.below(3) as u8)),
            4 => Expr::Unary(UnaryOp::ALL[self.below(UnaryOp::ALL.len() as u64) as usize], a),
            5..=7 => Expr::Binary(BinaryOp::ALL[self.below(BinaryOp::ALL.len() as u64) as usize], a, b),
            8 => Expr::Compare(CompareOp::ALL[self.below(6) as usize], a, b),
            9 => Expr::Select(a, b, c),
            _ if self.below(2) == 0 => Expr::Cast(dtype, a),
            _ => Expr::Uniform { id: self.below(1 << 32) as u32, seed: a, step: b, element: c },
        }
    }

    fn kernel(&mut self) -> Kernel {
        let argument = |rank| Argument { dtype: DType::F32, rank };
        let mut k = Kernel { inputs: (0..3).map(argument).collect(), outputs: vec![argument(1)], ..Kernel::default() };
        for name in ["i", "e0", "max"] {
            k.dim(name);
        }
        k.outer = (0..self.below(3)).map(|d| DimId(d as u8)).collect();
        for i in 0..1 + self.below(60) {
            let expr = self.expr(i);
            k.exprs.push(expr);
        }
        for var in 0..1 + self.below(4) as u32 {
            let value = ExprId(self.below(k.exprs.len() as u64) as u32);
            let over = (0..self.below(3)).map(|d| DimId(d as u8)).collect();
            k.body.push(match self.below(3) {
                0 => Stmt::Let { var: VarId(var), value },
                1 => Stmt::Reduce { var: VarId(var), op: [Reduce::Max, Reduce::Sum][self.below(2) as usize], over, value },
                _ => {
                    let mode = [StoreMode::Assign, StoreMode::Accumulate][self.below(2) as usize];
                    Stmt::Store { output: 0, over, index: vec![self.index(0)], value, mode }
                }
            });
        }
        k
    }
}

#[test]
fn kernels_round_trip() {
    let mut random = Random(1);
    for _ in 0..2000 {
        let mut p = parse(MLP).unwrap();
        p.kernels = vec![random.kernel()];
        p.sections.iter_mut().for_each(|s| s.body.retain(|i| !matches!(i.action, Action::Kernel(_))));
        let text = print(&p);
        let read = parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"));
        assert_eq!(read, p.canonical(), "{text}");
        assert_eq!(print(&read), text);
    }
}

#[test]
fn a_deep_expression_prints_flat() {
    let mut k = Kernel { outputs: vec![Argument { dtype: DType::F32, rank: 0 }], ..Kernel::default() };
    let mut value = k.expr(Expr::Const { dtype: DType::F32, bits: 0 });
    for _ in 0..20_000 {
        k.exprs.push(Expr::Unary(UnaryOp::Exp, value));
        value = ExprId(k.exprs.len() as u32 - 1);
    }
    k.body.push(Stmt::Store { output: 0, over: Vec::new(), index: Vec::new(), value, mode: StoreMode::Assign });
    let mut p = parse(MLP).unwrap();
    p.kernels.push(k);
    assert_eq!(parse(&print(&p)).unwrap(), p);
}

#[test]
fn errors_name_the_line() {
    let error = |from: &str, to: &str| parse(&MLP.replacen(from, to, 1)).unwrap_err().to_string();
    for (from, to, says) in [
        ("program mlp", "progrm mlp", "line 1: expected `program`"),
        ("tp=2)", "tp=2, tp=2)", "line 1: axis `tp` is declared twice"),
        ("scratch=96", "scratch=x", "line 2: expected a number, found `x`"),
        ("area m1", "area m2", "line 4: expected `m1`"),
        ("@p48 weight", "@q48 weight", "line 6: expected a place"),
        ("b1 f32[6/tp", "b1 f32[6/dp", "line 6: the mesh has no axis `dp`"),
        ("all_reduce.sum(tp)", "all_reduce.avg(tp)", "line 19: unknown reduction `avg`"),
        ("fused.0 b8", "fused.0 b8 b9", "line 17: expected `,`, found `b9"),
        ("b6 += dot", "b6 += fused.2", "line 24: `fused` cannot add"),
        ("dot(m k, k n -> m n) b2", "dot(m k, k n m n) b2", "has no `->`"),
        ("order begin", "order begun", "unknown section `begun`"),
        ("forward 0; backward", "forward 0..4294967295; backward", "more than"),
        ("kernel fused.1", "kernel fused.2", "the next kernel is fused.1"),
        ("e0 * e0", "e1 * e0", "e1 is not defined yet"),
        ("v0 = sum i, j: ", "v0 = sum i, k: ", "the kernel has no dim `k`"),
        ("0.0:f32", "0.0", "a constant with its dtype"),
    ] {
        assert!(error(from, to).contains(says), "{to}: {}", error(from, to));
    }
    let nested = format!("max({}x0[i, j]{}, 0.0:f32)", "(".repeat(100_000), ")".repeat(100_000));
    assert!(error("max(x0[i, j], 0.0:f32)", &nested).contains("nests deeper than"));
    assert_eq!(parse("").unwrap_err().to_string(), "line 1: the text is empty");
    let huge = MLP.replace("b18", "b4000000000");
    assert!(parse(&huge).unwrap_err().to_string().contains("b18 is not declared"));
}
