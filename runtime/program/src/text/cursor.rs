//! Reading one line: words, numbers, names, types. Errors are what was expected and what stands there.

use crate::mesh::{AxisId, Mesh};
use crate::types::{DType, Reduce, TensorType};
use std::str::FromStr;

pub(super) type Parsed<T> = Result<T, String>;

#[derive(Clone)]
pub(super) struct Cursor<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(text: &'a str) -> Cursor<'a> {
        Cursor { text, at: 0 }
    }

    /// What is still to be read, without leading spaces.
    pub fn rest(&mut self) -> &'a str {
        let rest = &self.text[self.at..];
        let trimmed = rest.trim_start_matches([' ', '\t']);
        self.at += rest.len() - trimmed.len();
        trimmed
    }

    /// Whether nothing but a comment is left.
    pub fn is_done(&mut self) -> bool {
        let rest = self.rest();
        rest.is_empty() || rest.starts_with('#')
    }

    pub fn done(&mut self) -> Parsed<()> {
        if self.is_done() { Ok(()) } else { Err(self.expected("the end of the line")) }
    }

    pub fn expected(&mut self, what: &str) -> String {
        let found: String = self.rest().chars().take(24).collect();
        if found.is_empty() { format!("expected {what}, the line ends") } else { format!("expected {what}, found `{found}`") }
    }

    /// Reads `token` if it stands here.
    pub fn eat(&mut self, token: &str) -> bool {
        let found = self.rest().starts_with(token);
        if found {
            self.at += token.len();
        }
        found
    }

    /// Reads `token` only if no space stands before it.
    pub fn eat_adjacent(&mut self, token: &str) -> bool {
        self.text[self.at..].starts_with(token) && self.eat(token)
    }

    pub fn expect(&mut self, token: &str) -> Parsed<()> {
        if self.eat(token) { Ok(()) } else { Err(self.expected(&format!("`{token}`"))) }
    }

    /// The word that stands here, without reading it; empty if none.
    pub fn peek_word(&mut self) -> &'a str {
        let rest = self.rest();
        let end = rest.bytes().position(|c| !(c.is_ascii_alphanumeric() || c == b'_')).unwrap_or(rest.len());
        let word = &rest[..end];
        if word.starts_with(|c: char| c.is_ascii_digit()) { "" } else { word }
    }

    pub fn word(&mut self, what: &str) -> Parsed<&'a str> {
        let word = self.peek_word();
        if word.is_empty() {
            return Err(self.expected(what));
        }
        self.at += word.len();
        Ok(word)
    }

    /// Reads `word` if it stands here as a whole word.
    pub fn eat_word(&mut self, word: &str) -> bool {
        let found = self.peek_word() == word;
        if found {
            self.at += word.len();
        }
        found
    }

    /// An unsigned decimal number.
    pub fn number<T: FromStr>(&mut self, what: &str) -> Parsed<T> {
        let rest = self.rest();
        let end = rest.bytes().position(|c| !c.is_ascii_digit()).unwrap_or(rest.len());
        let value = rest[..end].parse().map_err(|_| self.expected(what))?;
        self.at += end;
        Ok(value)
    }

    /// A number with its prefix, such as `b12`; `None` where something else stands here.
    pub fn id(&mut self, prefix: char) -> Option<u32> {
        let word = self.peek_word();
        let digits = word.strip_prefix(prefix)?;
        let id = if digits.is_empty() || (digits.len() > 1 && digits.starts_with('0')) { None } else { digits.parse().ok() }?;
        self.at += word.len();
        Some(id)
    }

    /// A name, bare or in quotes with `\"`, `\\`, `\n` and `\u{…}`.
    pub fn name(&mut self) -> Parsed<String> {
        let rest = self.rest();
        if !rest.starts_with('"') {
            let end = rest.find([' ', '\t', '#', '"']).unwrap_or(rest.len());
            if end == 0 {
                return Err(self.expected("a name"));
            }
            self.at += end;
            return Ok(rest[..end].to_owned());
        }
        let mut escaped = false;
        for (i, c) in rest.char_indices().skip(1) {
            match c {
                '"' if !escaped => {
                    self.at += i + 1;
                    return unescape(&rest[1..i]);
                }
                c => escaped = c == '\\' && !escaped,
            }
        }
        Err("a name lacks its closing quote".to_owned())
    }

    /// What stands between `(` and its `)`.
    pub fn parenthesized(&mut self) -> Parsed<&'a str> {
        let rest = self.rest();
        let mut depth = 0u32;
        for (i, c) in rest.bytes().enumerate() {
            match c {
                b'(' => depth += 1,
                b')' if depth == 1 => {
                    self.at += i + 1;
                    return Ok(&rest[1..i]);
                }
                b')' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 {
                return Err(self.expected("`(`"));
            }
        }
        Err(self.expected("a closed `( )`"))
    }

    pub fn axis(&mut self, mesh: &Mesh) -> Parsed<AxisId> {
        let name = self.word("an axis")?;
        mesh.axis(name).ok_or_else(|| format!("the mesh has no axis `{name}`"))
    }

    /// `f32[64/mb, 256]+tp`.
    pub fn tensor_type(&mut self, mesh: &Mesh) -> Parsed<TensorType> {
        let name = self.word("a dtype")?;
        let dtype = DType::parse(name).ok_or_else(|| format!("unknown dtype `{name}`"))?;
        let mut ty = TensorType::new(dtype, []);
        self.expect("[")?;
        while !self.eat("]") {
            if ty.rank() > 0 {
                self.expect(",")?;
            }
            if ty.rank() >= 32 {
                return Err("a type has more than 32 dims".to_owned());
            }
            ty.shape.push(self.number("a dim size")?);
            let mut axes = crate::types::AxisList::new();
            while self.eat_adjacent("/") {
                axes.push(self.axis(mesh)?);
            }
            ty.sharding.dims.push(axes);
        }
        while !self.text[self.at..].starts_with("+=") && self.eat_adjacent("+") {
            let mut reduce = Reduce::Sum;
            let word = self.peek_word();
            if let Some(other) = Reduce::parse(word)
                && self.text[self.at + word.len()..].starts_with(':')
            {
                self.at += word.len() + 1;
                reduce = other;
            }
            ty.sharding.pending.push((self.axis(mesh)?, reduce));
        }
        ty.sharding.pending.sort();
        ty.check_axes(mesh)?;
        Ok(ty)
    }
}

/// A name as `Cursor::name` reads it.
pub(super) fn quote(name: &str) -> String {
    let bare = |c: char| c.is_ascii_alphanumeric() || "_.:/-<>@".contains(c);
    if !name.is_empty() && name.chars().all(bare) {
        name.to_owned()
    } else {
        format!("\"{}\"", escape(name).replace('"', "\\\""))
    }
}

/// Backslashes and control characters escaped, so that the text stays on one line.
pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c if c.is_control() => out.push_str(&format!("\\u{{{:x}}}", c as u32)),
            c => out.push(c),
        }
    }
    out
}

pub(super) fn unescape(text: &str) -> Parsed<String> {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('n') => out.push('\n'),
            Some(c @ ('\\' | '"')) => out.push(c),
            Some('u') => {
                let digits: String = chars.by_ref().skip_while(|&c| c == '{').take_while(|&c| c != '}').take(8).collect();
                let code = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
                out.push(code.ok_or_else(|| format!("`\\u{{{digits}}}` is no character"))?);
            }
            _ => return Err("a backslash escapes nothing".to_owned()),
        }
    }
    Ok(out)
}
