//! Host lists as Slurm writes them: `node[1-3,07],login`, or with blanks in place of commas.

/// The first host of a list; `None` if it is empty or has an open bracket.
pub(super) fn first_host(list: &str) -> Option<String> {
    let first = split_outside_brackets(list.trim()).into_iter().next()?;
    let Some((prefix, rest)) = first.split_once('[') else {
        return Some(first.to_owned()).filter(|h| !h.is_empty());
    };
    let (numbers, suffix) = rest.split_once(']')?;
    let number = numbers.split([',', '-']).next().filter(|number| !number.is_empty())?;
    // a name may have several ranges
    first_host(&format!("{prefix}{number}{suffix}"))
}

fn split_outside_brackets(list: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, c) in list.char_indices() {
        match c {
            '[' => depth += 1,
            ']' => depth -= 1,
            ',' | ' ' if depth == 0 => {
                parts.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&list[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::first_host;

    #[test]
    fn the_first_host_of_a_list() {
        for (list, expected) in [
            ("alpha", Some("alpha")),
            ("alpha,beta,gamma", Some("alpha")),
            ("alpha beta gamma", Some("alpha")),
            ("host[5-9]", Some("host5")),
            ("alpha[01-03,07],beta", Some("alpha01")),
            ("rack[2,4]n[10-11].local", Some("rack2n10.local")),
            ("", None),
            ("host[5", None),
        ] {
            assert_eq!(first_host(list).as_deref(), expected, "{list}");
        }
    }
}
