//! Comparisons and logic.

use dcc_program::kernel::{BinaryOp, CompareOp, UnaryOp};

use super::{Call, Import};
use crate::error::Result;
use crate::import::build::Build;
use crate::import::value::Value;

pub const ONNX: &[(&str, Import)] = &[
    ("And", |b, c| logic(b, c, BinaryOp::And)),
    ("BitwiseAnd", |b, c| logic(b, c, BinaryOp::And)),
    ("BitwiseNot", |b, c| unary(b, c, UnaryOp::Not)),
    ("BitwiseOr", |b, c| logic(b, c, BinaryOp::Or)),
    ("BitwiseXor", |b, c| logic(b, c, BinaryOp::Xor)),
    ("Equal", |b, c| compare(b, c, CompareOp::Eq)),
    ("Greater", |b, c| compare(b, c, CompareOp::Gt)),
    ("GreaterOrEqual", |b, c| compare(b, c, CompareOp::Ge)),
    ("IsNaN", |b, c| unary(b, c, UnaryOp::IsNan)),
    ("Less", |b, c| compare(b, c, CompareOp::Lt)),
    ("LessOrEqual", |b, c| compare(b, c, CompareOp::Le)),
    ("Not", |b, c| unary(b, c, UnaryOp::Not)),
    ("Or", |b, c| logic(b, c, BinaryOp::Or)),
    ("Where", select),
    ("Xor", |b, c| logic(b, c, BinaryOp::Xor)),
];

fn unary(build: &mut Build, call: &Call, op: UnaryOp) -> Result<Vec<Value>> {
    Ok(vec![build.unary(op, call.input(0)?)?])
}

fn logic(build: &mut Build, call: &Call, op: BinaryOp) -> Result<Vec<Value>> {
    Ok(vec![build.binary(op, call.input(0)?, call.input(1)?)?])
}

fn compare(build: &mut Build, call: &Call, op: CompareOp) -> Result<Vec<Value>> {
    Ok(vec![build.compare(op, call.input(0)?, call.input(1)?)?])
}

fn select(build: &mut Build, call: &Call) -> Result<Vec<Value>> {
    Ok(vec![build.select(call.input(0)?, call.input(1)?, call.input(2)?)?])
}
