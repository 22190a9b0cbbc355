//! Glob patterns over tensor names: `*` any characters (`.` and `/` too), `?` one, `[abc]`, `[a-z]`, `[!a]` one of a class.
//!
//! The meaning is that of Python's `fnmatch.fnmatchcase`; a pattern matches the whole name.

/// A pattern; any text is one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Glob(pub String);

impl Glob {
    pub fn new(pattern: &str) -> Glob {
        Glob(pattern.to_owned())
    }

    /// The pattern that matches `name` alone.
    pub fn literal(name: &str) -> Glob {
        let one = |c: char| if matches!(c, '*' | '?' | '[') { format!("[{c}]") } else { c.to_string() };
        Glob(name.chars().map(one).collect())
    }

    /// Whether the pattern matches all of `name`. Takes time proportional to the product of both lengths at most.
    pub fn matches(&self, name: &str) -> bool {
        let (pattern, name): (Vec<char>, Vec<char>) = (self.0.chars().collect(), name.chars().collect());
        let (mut p, mut n) = (0, 0);
        let mut star = None;
        loop {
            if pattern.get(p) == Some(&'*') {
                star = Some((p, n));
                p += 1;
            } else if n == name.len() {
                return p == pattern.len();
            } else if let Some(width) = one(&pattern[p..], name[n]) {
                p += width;
                n += 1;
            } else {
                let Some((at, taken)) = star else { return false };
                star = Some((at, taken + 1));
                (p, n) = (at + 1, taken + 1);
            }
        }
    }

    /// Whether one of the patterns matches.
    pub fn any(globs: &[Glob], name: &str) -> bool {
        globs.iter().any(|glob| glob.matches(name))
    }
}

/// Length of the pattern's first element if it matches `c`.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern.first()? {
        '?' => Some(1),
        '[' => class(pattern, c).unwrap_or((c == '[').then_some(1)),
        &literal => (literal == c).then_some(1),
    }
}

/// `[…]` at the start of the pattern: its length if it contains `c`; outer `None` where the bracket never closes.
fn class(pattern: &[char], c: char) -> Option<Option<usize>> {
    let negated = pattern.get(1) == Some(&'!');
    let start = if negated { 2 } else { 1 };
    let close = (start + 1..pattern.len()).find(|&i| pattern[i] == ']')?;
    let members = &pattern[start..close];
    let (mut i, mut found) = (0, false);
    while i < members.len() {
        if i + 2 < members.len() && members[i + 1] == '-' {
            found |= (members[i]..=members[i + 2]).contains(&c);
            i += 3;
        } else {
            found |= members[i] == c;
            i += 1;
        }
    }
    Some((found != negated).then_some(close + 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_match_themselves_alone() {
        for name in ["h.0.weight", "a*b", "[x]?", "w[0]"] {
            let glob = Glob::literal(name);
            assert!(glob.matches(name) && !glob.matches(&format!("{name}.")), "{name}");
        }
        assert!(!Glob::literal("a*b").matches("axb") && !Glob::literal("w[0]").matches("w0"));
    }

    #[test]
    fn globs_match_as_fnmatch() {
        let yes = [
            ("*", ""),
            ("*.weight", "h.0.mlp.weight"),
            ("*.h.0.ln_1.*", "transformer.h.0.ln_1.bias"),
            ("h.?.w[0-3]", "h.7.w2"),
            ("[!a]b", "cb"),
            ("a[", "a["),
            ("[]]", "]"),
            ("*wpe*", "transformer.wpe.weight"),
            ("a*b*c", "axxbxbc"),
        ];
        let no = [
            ("", "a"),
            ("a", ""),
            ("*.weight", "h.0.bias"),
            ("h.?", "h.10"),
            ("[!a]b", "ab"),
            ("a*b*c", "axxbxb"),
            ("[a-c]", "d"),
        ];
        for (pattern, name) in yes {
            assert!(Glob::new(pattern).matches(name), "{pattern} {name}");
        }
        for (pattern, name) in no {
            assert!(!Glob::new(pattern).matches(name), "{pattern} {name}");
        }
    }
}
