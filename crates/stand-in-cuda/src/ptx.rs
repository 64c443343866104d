//! PTX, as far as its entries and their parameters.

/// An entry point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
}

/// Where a parameter lies and how long it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Param {
    pub(crate) offset: usize,
    pub(crate) size: usize,
}

/// The entries of a module; in words what is wrong with it, if something is.
pub(crate) fn entries(text: &str) -> Result<Vec<Entry>, String> {
    let text = without_comments(text);
    let mut words = words(&text);
    let mut found: Vec<Entry> = Vec::new();
    if words.next() != Some(".version") {
        return Err("Missing .version directive at start of file".to_owned());
    }
    if !text.contains(".target") {
        return Err("Missing .target directive".to_owned());
    }
    if text.matches('{').count() != text.matches('}').count() {
        return Err("Parsing error near the end of the file: a brace is missing".to_owned());
    }
    while words.any(|word| word == ".entry") {
        let name = words.next().filter(|name| is_name(name)).ok_or("Parsing error near '.entry': no name")?;
        let params = params(&mut words).map_err(|reason| format!("Parsing error in '{name}': {reason}"))?;
        if found.iter().any(|entry| entry.name == name) {
            return Err(format!("Duplicate definition of function '{name}'"));
        }
        found.push(Entry { name: name.to_owned(), params });
    }
    Ok(found)
}

fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("/*").into_iter().chain(rest.find("//")).min() {
        let end = if rest[at..].starts_with("/*") {
            rest[at..].find("*/").map(|end| at + end + 2)
        } else {
            rest[at..].find('\n').map(|end| at + end)
        };
        kept.push_str(&rest[..at]);
        kept.push(' ');
        rest = end.map_or("", |end| &rest[end..]);
    }
    kept + rest
}

/// Directives, names and single characters.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        rest = rest.trim_start();
        let first = rest.chars().next()?;
        let len = match first {
            c if is_part(c) => rest.find(|c| !is_part(c)).unwrap_or(rest.len()),
            c => c.len_utf8(),
        };
        let (word, behind) = rest.split_at(len);
        rest = behind;
        Some(word)
    })
}

const fn is_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '$' | '%')
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_alphabetic() || matches!(c, '_' | '$' | '%'))
}

/// The list in parentheses behind a name, if there is one.
fn params<'a>(words: &mut impl Iterator<Item = &'a str>) -> Result<Vec<Param>, String> {
    let mut params = Vec::new();
    match words.next() {
        Some("(") => {}
        // No list: the body or a directive follows.
        Some(_) => return Ok(params),
        None => return Err("no body".to_owned()),
    }
    let mut declaration = Vec::new();
    let mut offset: usize = 0;
    for word in words {
        if !matches!(word, "," | ")") {
            declaration.push(word);
            continue;
        }
        if !declaration.is_empty() {
            let (size, alignment) = layout(&declaration)?;
            offset = offset.next_multiple_of(alignment);
            params.push(Param { offset, size });
            offset += size;
            declaration.clear();
        }
        if word == ")" {
            return Ok(params);
        }
    }
    Err("the list of parameters does not end".to_owned())
}

/// Size and alignment of `.param [.align N] .TYPE [.ptr ..] NAME [ '[' N ']' ]`.
fn layout(declaration: &[&str]) -> Result<(usize, usize), String> {
    let bad = || format!("'{}' is no parameter", declaration.join(" "));
    let (first, rest) = declaration.split_first().ok_or_else(bad)?;
    if *first != ".param" {
        return Err(bad());
    }
    let element = rest.iter().find_map(|word| element_size(word)).ok_or_else(bad)?;
    let number = |word: &&str| word.parse::<usize>().ok().filter(|&number| number > 0);
    let count = match rest.iter().position(|word| *word == "[") {
        Some(at) => rest.get(at + 1).and_then(number).ok_or_else(bad)?,
        None => 1,
    };
    // Of the parameter itself: behind `.ptr` stands the alignment of what a pointer points to.
    let own = rest.iter().take_while(|word| **word != ".ptr").position(|word| *word == ".align");
    let alignment = match own {
        Some(at) => rest.get(at + 1).and_then(number).filter(|n| n.is_power_of_two()).ok_or_else(bad)?,
        None => element,
    };
    Ok((element * count, alignment))
}

fn element_size(word: &str) -> Option<usize> {
    let bits = word.strip_prefix(['.'])?.strip_prefix(['u', 's', 'b', 'f'])?;
    match bits {
        "8" => Some(1),
        "16" => Some(2),
        "32" => Some(4),
        "64" => Some(8),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 8.0\n.target sm_70\n.address_size 64\n";

    fn check(body: &str, expected: &[(&str, &[(usize, usize)])]) {
        let found = entries(&format!("// a comment\n{HEAD}{body}")).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|entry| {
                let params: Vec<_> = entry.params.iter().map(|param| (param.offset, param.size)).collect();
                (entry.name.as_str(), params)
            })
            .collect();
        let expected: Vec<_> = expected.iter().map(|(name, params)| (*name, params.to_vec())).collect();
        assert_eq!(found, expected, "{body}");
    }

    #[test]
    fn entries_and_the_places_of_their_parameters_are_found() {
        check("", &[]);
        check(".visible .entry empty()\n{ ret; }", &[("empty", &[])]);
        check(".entry bare { ret; }", &[("bare", &[])]);
        check(
            ".visible .entry a(.param .u64 a_0, .param .u32 a_1, .param .u64 a_2) { ret; }\n.entry b() { }",
            &[("a", &[(0, 8), (8, 4), (16, 8)]), ("b", &[])],
        );
        check(
            ".entry r(\n .param .align 8 .b8 r_0[56], // a slice\n .param .u64 .ptr .align 1 r_1\n) { ret; }",
            &[("r", &[(0, 56), (56, 8)])],
        );
        check("/* .entry hidden() {} */ .entry seen() { }", &[("seen", &[])]);
    }

    #[test]
    fn what_is_no_ptx_is_refused_in_words() {
        let refuse = |text: &str, word: &str| {
            let log = entries(text).unwrap_err();
            assert!(log.contains(word), "{log}");
        };
        refuse("", ".version");
        refuse("int main() {}", ".version");
        refuse(".version 8.0", ".target");
        refuse(&format!("{HEAD}.entry a("), "does not end");
        refuse(&format!("{HEAD}.entry a(.param .q8 x) {{}}"), "is no parameter");
        refuse(&format!("{HEAD}.entry a() {{"), "brace");
        refuse(&format!("{HEAD}.entry a() {{}} .entry a() {{}}"), "Duplicate");
    }
}
