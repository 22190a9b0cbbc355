//! `dcc explain CODE`: the page of an error code.

use super::failure::Outcome;
use super::output;
use crate::error::{self, Error};

#[derive(clap::Args)]
pub struct Args {
    /// Such as DCC0104; all codes with their titles where left out
    code: Option<String>,
}

/// Code, title and text of every page, the compiler's and the runtime's, by code.
fn pages() -> Vec<(u16, &'static str, &'static str)> {
    let compiler = error::PAGES.iter().map(|page| (page.code.0, page.title, page.text));
    let mut all: Vec<_> = compiler.chain(dcc_runtime::error::PAGES.iter().copied()).collect();
    all.sort_unstable_by_key(|page| page.0);
    all
}

pub fn run(args: &Args) -> Outcome<i32> {
    let Some(code) = &args.code else {
        let lines = pages().into_iter().map(|(code, title, _)| format!("DCC{code:04}  {title}\n"));
        output::data(&lines.collect::<String>())?;
        return Ok(0);
    };
    let digits = code.to_ascii_uppercase();
    let number = digits.strip_prefix("DCC").unwrap_or(&digits).parse::<u16>().ok();
    let page = number.and_then(|number| pages().into_iter().find(|page| page.0 == number));
    let (code, title, text) =
        page.ok_or_else(|| Error::usage(format!("`{code}` is no error code of dcc")).help("`dcc explain` lists them"))?;
    output::data(&format!("DCC{code:04}: {title}\n\n{}", wrap(text, 100)))?;
    Ok(0)
}

fn wrap(text: &str, width: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            *line += &format!(" {word}");
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The numbers that follow `call` in a source text.
    fn numbers(source: &str, call: &str) -> BTreeSet<u16> {
        let after = source.split(call).skip(1);
        after.filter_map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()).collect()
    }

    #[test]
    fn every_code_has_one_page() {
        let mut made = numbers(include_str!("../error.rs"), "Error::new(");
        made.extend(numbers(include_str!("../../../runtime/src/error.rs"), "(report("));
        made.extend(numbers(include_str!("../cli.rs"), "error[DCC"));
        let all = pages();
        let codes: BTreeSet<u16> = all.iter().map(|page| page.0).collect();
        let missing: Vec<_> = made.difference(&codes).collect();
        assert!(missing.is_empty(), "codes without a page: {missing:?}");
        let unused: Vec<_> = codes.difference(&made).collect();
        assert!(unused.is_empty(), "pages of codes that nothing makes: {unused:?}");
        assert_eq!(codes.len(), all.len(), "a code has one page");
    }

    #[test]
    fn text_wraps() {
        assert_eq!(wrap("a bc d", 4), "a bc\nd\n");
    }
}
