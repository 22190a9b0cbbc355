//! Reads programs, line by line. Numbers that decide how much memory is taken are bounded by the length of the text.

use super::ParseError;
use super::cursor::{Cursor, Parsed, unescape};
use super::instr::{self, Target};
use super::kernel_parse::KernelParser;
use crate::mesh::{Mesh, MeshAxis};
use crate::program::*;
use smallvec::SmallVec;
use std::collections::HashMap;

/// Steps that one text may expand to.
const MAX_STEPS: usize = 1 << 22;

pub(super) fn program(text: &str) -> Result<Program, ParseError> {
    let mut lines = text.lines().zip(1u32..).filter(|(l, _)| !Cursor::new(l).is_done());
    let (first, line) = lines.next().ok_or(ParseError { line: 1, what: "the text is empty".to_owned() })?;
    let at = |line: u32| move |what: String| ParseError { line, what };
    let mut parser = Parser { p: header(&mut Cursor::new(first)).map_err(at(line))?, buffers: HashMap::new(), kernel: None };
    let mut last = line;
    for (text, line) in lines {
        parser.line(text).map_err(at(line))?;
        last = line;
    }
    parser.finish().map_err(at(last))
}

struct Parser {
    p: Program,
    /// Declared so far, by id.
    buffers: HashMap<u32, Buffer>,
    /// The kernel whose statements are being read.
    kernel: Option<KernelParser>,
}

fn keyword(line: &mut Cursor, word: &str) -> Parsed<()> {
    if line.eat_word(word) { Ok(()) } else { Err(line.expected(&format!("`{word}`"))) }
}

/// `program mlp train stage 0/1 mesh(mb=1, tp=2)`.
fn header(line: &mut Cursor) -> Parsed<Program> {
    keyword(line, "program")?;
    let name = line.name()?;
    let mode = match line.word("`train` or `eval`")? {
        "train" => Mode::Train,
        "eval" => Mode::Eval,
        other => return Err(format!("unknown mode `{other}`")),
    };
    keyword(line, "stage")?;
    let stage = line.number("a stage")?;
    line.expect("/")?;
    let stages = line.number("the number of stages")?;
    keyword(line, "mesh")?;
    line.expect("(")?;
    let mut mesh = Mesh { axes: Vec::new() };
    while !line.eat(")") {
        if !mesh.axes.is_empty() {
            line.expect(",")?;
        }
        let name = line.word("an axis")?.to_owned();
        if mesh.axis(&name).is_some() || mesh.axes.len() >= 32 {
            return Err(format!("axis `{name}` is declared twice, or is one of more than 32"));
        }
        line.expect("=")?;
        mesh.axes.push(MeshAxis { name, size: line.number("an axis size")? });
    }
    line.done()?;
    Ok(Program {
        name,
        mode,
        stage,
        stages,
        mesh,
        persistent_bytes: 0,
        scratch_bytes: 0,
        areas: Vec::new(),
        groups: Vec::new(),
        params: Vec::new(),
        inputs: Vec::new(),
        scalars: Vec::new(),
        outputs: Vec::new(),
        buffers: Vec::new(),
        kernels: Vec::new(),
        sections: Vec::new(),
        order: Vec::new(),
    })
}

impl Parser {
    fn line(&mut self, text: &str) -> Parsed<()> {
        let mut cursor = Cursor::new(text);
        let line = &mut cursor;
        if text.starts_with([' ', '\t'])
            && let Some(kernel) = &mut self.kernel
        {
            return kernel.line(line);
        }
        let mut ahead = line.clone();
        let line = &mut ahead;
        match line.word("a line").unwrap_or_default() {
            "kernel" => self.kernel(line)?,
            "memory" => self.memory(line)?,
            "area" => self.area(line)?,
            "group" => self.group(line)?,
            "param" => self.param(line)?,
            "section" => self.section(line)?,
            "order" => self.order(line)?,
            keyword @ ("input" | "scalar" | "output" | "buffer") => self.external(keyword, line)?,
            _ => return self.instr(text),
        }
        line.done()
    }

    fn memory(&mut self, line: &mut Cursor) -> Parsed<()> {
        self.p.persistent_bytes = field(line, "persistent")?;
        self.p.scratch_bytes = field(line, "scratch")?;
        Ok(())
    }

    fn area(&mut self, line: &mut Cursor) -> Parsed<()> {
        next_id(line, 'm', self.p.areas.len())?;
        let from = section_id(line)?;
        line.expect("->")?;
        let to = section_id(line)?;
        let bytes = field(line, "bytes")?;
        let slots = field(line, "slots")?.try_into().map_err(|_| "more slots than 32 bits count")?;
        self.p.areas.push(Area { from, to, bytes, slots });
        Ok(())
    }

    fn group(&mut self, line: &mut Cursor) -> Parsed<()> {
        next_id(line, 'g', self.p.groups.len())?;
        let name = line.name()?;
        keyword(line, "stages")?;
        line.expect("(")?;
        let mut stages = vec![line.number("a stage")?];
        while line.eat(",") {
            stages.push(line.number("a stage")?);
        }
        line.expect(")")?;
        self.p.groups.push(StageGroup { name, stages });
        Ok(())
    }

    fn param(&mut self, line: &mut Cursor) -> Parsed<()> {
        let buffer = self.target(line)?;
        let kind = match line.word("`weight` or `state`")? {
            "weight" => ParamKind::Weight,
            "state" => ParamKind::State(line.name()?),
            other => return Err(format!("unknown kind of parameter `{other}`")),
        };
        let name = line.name()?;
        let mut piece = None;
        if line.eat_word("piece") {
            line.expect("(")?;
            keyword(line, "dim")?;
            let dim = line.number("a dim")?;
            line.expect(",")?;
            let start = line.number("a start")?;
            line.expect("..")?;
            piece = Some(Piece { dim, start, end: line.number("an end")? });
            line.expect(")")?;
        }
        let trained = line.eat_word("trained");
        self.p.params.push(Param { buffer, name, kind, piece, trained });
        Ok(())
    }

    fn external(&mut self, keyword: &str, line: &mut Cursor) -> Parsed<()> {
        let buffer = self.target(line)?;
        match keyword {
            "input" => self.p.inputs.push(Input { buffer, name: line.name()? }),
            "output" => self.p.outputs.push(Output { buffer, name: line.name()? }),
            "scalar" => {
                let name = line.word("a scalar's name")?;
                let kind = ScalarKind::ALL.into_iter().find(|k| k.name() == name);
                self.p.scalars.push(Scalar { buffer, kind: kind.ok_or_else(|| format!("unknown scalar `{name}`"))? });
            }
            _ => {}
        }
        Ok(())
    }

    fn section(&mut self, line: &mut Cursor) -> Parsed<()> {
        let (id, number) = section_name(line)?;
        let expected = self.p.sections.iter().filter(|s| s.id() == id).count();
        if number != expected {
            return Err(format!("the next section {} is number {expected}", id.name()));
        }
        self.p.sections.push(Section { kind: id.kind, chunk: id.chunk, body: Vec::new() });
        Ok(())
    }

    /// `b4`, followed by type and place unless it is declared already.
    fn target(&mut self, line: &mut Cursor) -> Parsed<BufferId> {
        let id = line.id('b').ok_or_else(|| line.expected("a buffer"))?;
        let mut ahead = line.clone();
        let declares = crate::types::DType::parse(ahead.peek_word()).is_some() && {
            let _ = ahead.word("a dtype");
            ahead.eat("[")
        };
        if declares {
            let ty = line.tensor_type(&self.p.mesh)?;
            line.expect("@")?;
            let place = match line.peek_word().as_bytes().first() {
                Some(b'p') => Place::Persistent,
                Some(b's') => Place::Scratch,
                _ => Place::Area(line.id('m').ok_or_else(|| line.expected("a place"))?),
            };
            let offset = match place {
                Place::Area(_) => {
                    line.expect("+")?;
                    line.number("an offset")?
                }
                _ => {
                    line.eat(if place == Place::Persistent { "p" } else { "s" });
                    line.number("an offset")?
                }
            };
            if self.buffers.insert(id, Buffer { ty, place, offset }).is_some() {
                return Err(format!("b{id} is declared twice"));
            }
        }
        Ok(BufferId(id))
    }

    fn instr(&mut self, text: &str) -> Parsed<()> {
        let (code, origin) = text.split_once('#').unwrap_or((text, ""));
        let origin = unescape(origin.strip_prefix(' ').unwrap_or(origin))?;
        let line = &mut Cursor::new(code);
        let mut results = SmallVec::new();
        let mut target = Target::None;
        if let Some(token) = line.id('t') {
            target = Target::Token(TokenId(token));
            line.expect("=")?;
        } else if line.peek_word() != "wait" {
            results.push(self.target(line)?);
            while line.eat(",") {
                results.push(self.target(line)?);
            }
            target = if line.eat("+=") { Target::Accumulate } else { Target::Assign };
            if target == Target::Assign {
                line.expect("=")?;
            }
        }
        let action = instr::action(line, &self.p.mesh, target)?;
        let mut operands = SmallVec::new();
        while !line.is_done() {
            if !operands.is_empty() {
                line.expect(",")?;
            }
            operands.push(BufferId(line.id('b').ok_or_else(|| line.expected("a buffer"))?));
        }
        let section = self.p.sections.last_mut().ok_or_else(|| Cursor::new(code).expected("a header line or `section`"))?;
        section.body.push(Instr { results, action, operands, origin });
        Ok(())
    }

    /// `order forward 0 [0 1]; backward 0..4`.
    fn order(&mut self, line: &mut Cursor) -> Parsed<()> {
        loop {
            let (id, number) = section_name(line)?;
            let section = self.p.sections.iter().enumerate().filter(|(_, s)| s.id() == id).nth(number);
            let section = section.ok_or_else(|| format!("there is no section {}.{number}", id.name()))?.0 as u32;
            let is_digit = |line: &mut Cursor| line.rest().starts_with(|c: char| c.is_ascii_digit());
            let first: u32 = if is_digit(line) { line.number("a microbatch")? } else { 0 };
            let end: u32 = if line.eat("..") { line.number("a microbatch")? } else { first.saturating_add(1) };
            let mut slots: SmallVec<[u32; 4]> = SmallVec::from_elem(0, self.p.areas.len());
            if line.eat("[") {
                slots.clear();
                while !line.eat("]") {
                    slots.push(line.number("a slot")?);
                }
            }
            if self.p.order.len() + end.saturating_sub(first) as usize > MAX_STEPS {
                return Err(format!("the order has more than {MAX_STEPS} steps"));
            }
            self.p.order.extend((first..end).map(|microbatch| Step { section, microbatch, slots: slots.clone() }));
            if !line.eat(";") {
                return Ok(());
            }
        }
    }

    fn kernel(&mut self, line: &mut Cursor) -> Parsed<()> {
        self.p.kernels.extend(self.kernel.take().map(KernelParser::finish));
        self.kernel = Some(KernelParser::header(line, self.p.kernels.len())?);
        Ok(())
    }

    fn finish(mut self) -> Parsed<Program> {
        self.p.kernels.extend(self.kernel.take().map(KernelParser::finish));
        for id in 0..self.buffers.len() as u32 {
            let missing = || format!("b{id} is not declared, though {} buffers are", self.buffers.len());
            let buffer = self.buffers.get(&id).ok_or_else(missing)?;
            self.p.buffers.push(buffer.clone());
        }
        let instrs = self.p.sections.iter().flat_map(|s| &s.body);
        let used = instrs.flat_map(|i| i.operands.iter().chain(&i.results)).copied();
        let external = self.p.params.iter().map(|p| p.buffer).chain(self.p.inputs.iter().map(|i| i.buffer));
        let scalars = self.p.scalars.iter().map(|s| s.buffer).chain(self.p.outputs.iter().map(|o| o.buffer));
        match used.chain(external).chain(scalars).find(|b| b.0 as usize >= self.p.buffers.len()) {
            Some(b) => Err(format!("b{} is used but not declared", b.0)),
            None => Ok(self.p),
        }
    }
}

fn next_id(line: &mut Cursor, prefix: char, number: usize) -> Parsed<()> {
    if line.id(prefix) == Some(number as u32) { Ok(()) } else { Err(line.expected(&format!("`{prefix}{number}`"))) }
}

/// `bytes=4096`.
fn field(line: &mut Cursor, name: &str) -> Parsed<u64> {
    keyword(line, name)?;
    line.expect("=")?;
    line.number("a number")
}

fn section_kind(name: &str) -> Parsed<SectionKind> {
    SectionKind::ALL.into_iter().find(|k| k.name() == name).ok_or_else(|| format!("unknown section `{name}`"))
}

/// `forward`, or `forward:1` of the second chunk.
fn section_id(line: &mut Cursor) -> Parsed<SectionId> {
    let kind = section_kind(line.word("a section")?)?;
    let chunk = if line.eat_adjacent(":") { line.number("a chunk")? } else { 0 };
    Ok(SectionId { kind, chunk })
}

/// `forward`, or `forward.1` for the second of that kind and chunk.
fn section_name(line: &mut Cursor) -> Parsed<(SectionId, usize)> {
    let id = section_id(line)?;
    let number = if line.eat_adjacent(".") { line.number("a section's number")? } else { 0 };
    Ok((id, number))
}
