//! Slurm's way to write many host names.

/// The most names that a text is expanded to; a machine has fewer.
const HOSTS: usize = 1 << 20;

/// Expands `node[001,007-009],login` to `node001`, `node007`, `node008`, `node009`, `login`.
///
/// Nothing if the text is damaged, or names more hosts than any machine has.
pub fn expand_host_list(text: &str) -> Option<Vec<String>> {
    let mut hosts = Vec::new();
    for item in split_outside_brackets(text)? {
        expand(item, &mut hosts)?;
    }
    (!hosts.is_empty()).then_some(hosts)
}

/// Splits at commas that stand in no brackets.
fn split_outside_brackets(text: &str) -> Option<Vec<&str>> {
    let (mut items, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'[' if !inside => inside = true,
            b']' if inside => inside = false,
            b'[' | b']' => return None,
            b',' if !inside => {
                items.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    items.push(&text[start..]);
    (!inside).then_some(items)
}

/// Expands one item, in which several brackets multiply.
fn expand(item: &str, hosts: &mut Vec<String>) -> Option<()> {
    let mut names = vec![String::new()];
    let mut rest = item;
    while let Some((before, after)) = rest.split_once('[') {
        let (ranges, after) = after.split_once(']')?;
        let numbers = numbers(ranges)?;
        if names.len().checked_mul(numbers.len())? > HOSTS {
            return None;
        }
        let longer = |name: &String| -> Vec<String> {
            numbers.iter().map(|number| format!("{name}{before}{number}")).collect()
        };
        names = names.iter().flat_map(longer).collect();
        rest = after;
    }
    names.iter_mut().for_each(|name| name.push_str(rest));
    let is_right = |name: &String| !name.is_empty() && !name.contains(char::is_whitespace);
    if !names.iter().all(is_right) || hosts.len() + names.len() > HOSTS {
        return None;
    }
    hosts.append(&mut names);
    Some(())
}

/// `001,007-009`, each number as wide as it was written.
fn numbers(ranges: &str) -> Option<Vec<String>> {
    let mut numbers = Vec::new();
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        if !is_number(first) || !is_number(last) || first.len() > 18 {
            return None;
        }
        let (from, to, width) = (first.parse::<u64>().ok()?, last.parse::<u64>().ok()?, first.len());
        let count = usize::try_from(to.checked_sub(from)?).ok()?;
        if numbers.len().saturating_add(count) >= HOSTS {
            return None;
        }
        numbers.extend((from..=to).map(|number| format!("{number:0width$}")));
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(text: &str, expected: &[&str]) {
        let hosts = expand_host_list(text);
        assert_eq!(
            hosts.as_deref(),
            Some(expected.iter().map(ToString::to_string).collect::<Vec<_>>().as_slice()),
            "{text}"
        );
    }

    #[test]
    fn lists_are_expanded() {
        check("a", &["a"]);
        check("a,b", &["a", "b"]);
        check("node[001,007-009]", &["node001", "node007", "node008", "node009"]);
        check("n[8-11]", &["n8", "n9", "n10", "n11"]);
        check("n[098-101]-ib,login", &["n098-ib", "n099-ib", "n100-ib", "n101-ib", "login"]);
        check("r[1-2]n[3,5]", &["r1n3", "r1n5", "r2n3", "r2n5"]);
    }

    #[test]
    fn damaged_and_endless_lists_are_refused() {
        for text in [
            "",
            ",",
            "a,",
            "[",
            "a[",
            "a]",
            "a[1",
            "a[]",
            "a[1-]",
            "a[-1]",
            "a[2-1]",
            "a[x]",
            "a[[1]]",
            "a b",
            "a[0-99999999999]",
            "a[0-9999][0-9999]",
            "a[99999999999999999999]",
        ] {
            assert_eq!(expand_host_list(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in r"[a-c0-9\[\],-]{0,40}") {
            let _ = expand_host_list(&text);
        }
    }
}
