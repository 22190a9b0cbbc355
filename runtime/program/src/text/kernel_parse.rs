//! Reads kernels: the header line, then one statement or named expression a line.

use super::cursor::{Cursor, Parsed};
use crate::kernel::*;
use crate::types::{DType, Reduce};

/// Levels of nesting that a line may have; what `print` writes stays far below.
const MAX_NESTING: u32 = 64;

/// A kernel under construction.
#[derive(Default)]
pub(super) struct KernelParser {
    kernel: Kernel,
    interner: Interner,
    named: Vec<ExprId>,
    nesting: u32,
}

impl KernelParser {
    /// Reads what follows `kernel`; `number` is the one it must have.
    pub fn header(line: &mut Cursor, number: usize) -> Parsed<KernelParser> {
        line.expect("fused.")?;
        if line.number::<usize>("a kernel's number")? != number {
            return Err(format!("the next kernel is fused.{number}"));
        }
        let mut parser = KernelParser::default();
        parser.kernel.inputs = arguments(line, 'x')?;
        line.expect("->")?;
        parser.kernel.outputs = arguments(line, 'y')?;
        line.expect("dims")?;
        line.expect("(")?;
        while !line.eat(")") {
            if !parser.kernel.dims.is_empty() {
                line.expect(",")?;
            }
            let name = line.word("a dim")?;
            if parser.kernel.dims.iter().any(|d| d == name) || parser.kernel.dims.len() >= 64 {
                return Err(format!("dim `{name}` is declared twice, or is one of more than 64"));
            }
            parser.kernel.dims.push(name.to_owned());
        }
        line.expect("outer")?;
        line.expect("(")?;
        if !line.eat(")") {
            parser.kernel.outer = parser.dims(line)?;
            line.expect(")")?;
        }
        line.done()?;
        Ok(parser)
    }

    pub fn finish(self) -> Kernel {
        self.kernel.canonical()
    }

    pub fn line(&mut self, line: &mut Cursor) -> Parsed<()> {
        if let Some(name) = line.id('e') {
            line.expect("=")?;
            let value = self.expr(line)?;
            if name as usize != self.named.len() {
                return Err(format!("the next named expression is e{}", self.named.len()));
            }
            self.named.push(value);
        } else if let Some(var) = line.id('v') {
            line.expect("=")?;
            let stmt = self.value_stmt(line, VarId(var))?;
            self.kernel.body.push(stmt);
        } else {
            let over = if line.eat_word("for") { self.dims(line)? } else { Vec::new() };
            if !over.is_empty() {
                line.expect(":")?;
            }
            let stmt = self.store(line, over)?;
            self.kernel.body.push(stmt);
        }
        line.done()
    }

    fn value_stmt(&mut self, line: &mut Cursor, var: VarId) -> Parsed<Stmt> {
        let mut ahead = line.clone();
        let reduce = Reduce::parse(ahead.peek_word());
        match reduce {
            Some(op) if ahead.word("a reduction").is_ok() && !ahead.eat("(") => {
                let over = if ahead.eat(":") { Vec::new() } else { self.dims(&mut ahead)? };
                if !over.is_empty() {
                    ahead.expect(":")?;
                }
                *line = ahead;
                Ok(Stmt::Reduce { var, op, over, value: self.expr(line)? })
            }
            _ => Ok(Stmt::Let { var, value: self.expr(line)? }),
        }
    }

    fn store(&mut self, line: &mut Cursor, over: Vec<DimId>) -> Parsed<Stmt> {
        let output = line.id('y').and_then(|n| u8::try_from(n).ok()).ok_or_else(|| line.expected("a statement"))?;
        let index = self.index(line)?;
        let mode = if line.eat("+=") { StoreMode::Accumulate } else { StoreMode::Assign };
        if mode == StoreMode::Assign {
            line.expect("=")?;
        }
        Ok(Stmt::Store { output, over, index, value: self.expr(line)?, mode })
    }

    fn dims(&self, line: &mut Cursor) -> Parsed<Vec<DimId>> {
        let mut dims = vec![self.dim(line)?];
        while line.eat(",") {
            dims.push(self.dim(line)?);
        }
        Ok(dims)
    }

    fn dim(&self, line: &mut Cursor) -> Parsed<DimId> {
        let name = line.word("a dim")?;
        let position = self.kernel.dims.iter().position(|d| d == name);
        position.map(|i| DimId(i as u8)).ok_or_else(|| format!("the kernel has no dim `{name}`"))
    }

    fn add(&mut self, expr: Expr) -> ExprId {
        self.interner.add(&mut self.kernel, expr)
    }

    fn expr(&mut self, line: &mut Cursor) -> Parsed<ExprId> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            return Err(format!("an expression nests deeper than {MAX_NESTING}"));
        }
        let mut left = self.term(line)?;
        while !line.rest().starts_with("+=") {
            let op = match () {
                () if line.eat("+") => BinaryOp::Add,
                () if line.eat("-") => BinaryOp::Sub,
                () => break,
            };
            let right = self.term(line)?;
            left = self.add(Expr::Binary(op, left, right));
        }
        self.nesting -= 1;
        Ok(left)
    }

    fn term(&mut self, line: &mut Cursor) -> Parsed<ExprId> {
        let mut left = self.atom(line)?;
        loop {
            let op = match () {
                () if line.eat("*") => BinaryOp::Mul,
                () if line.eat("/") => BinaryOp::Div,
                () => return Ok(left),
            };
            let right = self.atom(line)?;
            left = self.add(Expr::Binary(op, left, right));
        }
    }

    fn atom(&mut self, line: &mut Cursor) -> Parsed<ExprId> {
        if line.eat("(") {
            let inner = self.expr(line)?;
            line.expect(")")?;
            return Ok(inner);
        }
        if line.rest().starts_with(|c: char| c.is_ascii_digit() || c == '-') || line.peek_word() == "inf" {
            let constant = constant(line)?;
            return Ok(self.add(constant));
        }
        if let Some(name) = line.id('e') {
            return self.named.get(name as usize).copied().ok_or_else(|| format!("e{name} is not defined yet"));
        }
        if let Some(var) = line.id('v') {
            return Ok(self.add(Expr::Var(VarId(var))));
        }
        if let Some(input) = line.id('x') {
            let input = u8::try_from(input).map_err(|_| format!("x{input}: more than 256 inputs"))?;
            let index = self.index(line)?;
            let outside = if line.eat_adjacent("?") { Outside::Zero } else { Outside::Never };
            return Ok(self.add(Expr::Load { input, index, outside }));
        }
        let name = line.word("an expression")?;
        self.call(name, line)
    }

    fn call(&mut self, name: &str, line: &mut Cursor) -> Parsed<ExprId> {
        if name == "position" {
            line.expect("(")?;
            let dim = self.dim(line)?;
            line.expect(")")?;
            return Ok(self.add(Expr::Position(dim)));
        }
        let id: u32 = if name == "uniform" && line.eat_adjacent(".") { line.number("a stream's number")? } else { 0 };
        let mut operands = Vec::new();
        line.expect("(")?;
        loop {
            operands.push(self.expr(line)?);
            if operands.len() > 3 || !line.eat(",") {
                break;
            }
        }
        line.expect(")")?;
        let expr = match operands[..] {
            [a] if UnaryOp::parse(name).is_some() => UnaryOp::parse(name).map(|op| Expr::Unary(op, a)),
            [a] => DType::parse(name).map(|dtype| Expr::Cast(dtype, a)),
            [a, b] if BinaryOp::parse(name).is_some() => BinaryOp::parse(name).map(|op| Expr::Binary(op, a, b)),
            [a, b] => CompareOp::parse(name).map(|op| Expr::Compare(op, a, b)),
            [a, b, c] if name == "select" => Some(Expr::Select(a, b, c)),
            [seed, step, element] if name == "uniform" => Some(Expr::Uniform { id, seed, step, element }),
            _ => None,
        };
        let expr = expr.ok_or_else(|| format!("no function `{name}` of {} arguments", operands.len()))?;
        Ok(self.add(expr))
    }

    fn index(&mut self, line: &mut Cursor) -> Parsed<Vec<Index>> {
        line.expect("[")?;
        let mut index = Vec::new();
        while !line.eat("]") {
            if !index.is_empty() {
                line.expect(",")?;
            }
            index.push(match () {
                () if line.eat("{") => {
                    let value = self.expr(line)?;
                    line.expect("}")?;
                    Index::Expr(value)
                }
                () if line.peek_word().is_empty() => self.affine(line)?,
                () => Index::Dim(self.dim(line)?),
            });
        }
        Ok(index)
    }

    /// `2*i + 1*j - 3`, or a number.
    fn affine(&self, line: &mut Cursor) -> Parsed<Index> {
        let (mut terms, mut offset) = (Vec::new(), 0i64);
        let mut negative = line.eat("-");
        loop {
            // The printer writes negative coefficients after a `+`, too.
            negative ^= line.eat_adjacent("-");
            let magnitude: u64 = line.number("an index")?;
            let value = if negative { 0i64.checked_sub_unsigned(magnitude) } else { i64::try_from(magnitude).ok() };
            let value = value.ok_or("an index is out of range")?;
            if line.eat("*") {
                terms.push((self.dim(line)?, value));
            } else {
                offset = offset.checked_add(value).ok_or("an index is out of range")?;
            }
            negative = match () {
                () if line.eat("+ ") => false,
                () if line.eat("- ") => true,
                () => return Ok(Index::Affine { terms, offset }),
            };
        }
    }
}

fn arguments(line: &mut Cursor, prefix: char) -> Parsed<Vec<Argument>> {
    let mut out = Vec::new();
    line.expect("(")?;
    while !line.eat(")") {
        if !out.is_empty() {
            line.expect(",")?;
        }
        if out.len() >= 256 || line.id(prefix) != Some(out.len() as u32) {
            return Err(line.expected(&format!("`{prefix}{}`", out.len())));
        }
        line.expect(":")?;
        let name = line.word("a dtype")?;
        let dtype = DType::parse(name).ok_or_else(|| format!("unknown dtype `{name}`"))?;
        line.expect("[")?;
        let mut rank = 0u8;
        while !line.eat("]") {
            if rank > 0 {
                line.expect(",")?;
            }
            line.expect("_")?;
            rank = rank.checked_add(1).ok_or("an argument has more than 255 dims")?;
        }
        out.push(Argument { dtype, rank });
    }
    Ok(out)
}

/// `0.5:f32`, `-inf:f64`, `0x7ff8000000000000:f32`, `3:i64`.
fn constant(line: &mut Cursor) -> Parsed<Expr> {
    let rest = line.rest();
    let end = rest.find(':').ok_or_else(|| line.expected("a constant with its dtype, such as `0.5:f32`"))?;
    let digits = &rest[..end];
    line.eat(digits);
    line.expect(":")?;
    let name = line.word("a dtype")?;
    let dtype = DType::parse(name).ok_or_else(|| format!("unknown dtype `{name}`"))?;
    let wrong = || format!("`{digits}` is no constant of dtype {name}");
    let bits = match digits.strip_prefix("0x") {
        Some(hex) if dtype.is_float() => u64::from_str_radix(hex, 16).map_err(|_| wrong())?,
        _ if dtype.is_float() => digits.parse::<f64>().map_err(|_| wrong())?.to_bits(),
        _ => digits.parse::<i64>().map_err(|_| wrong())? as u64,
    };
    Ok(Expr::Const { dtype, bits })
}
