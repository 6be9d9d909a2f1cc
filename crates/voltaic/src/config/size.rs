//! Sizes of memory as people write them.

/// Reads a number of bytes: `1073741824`, `512MiB`, `4GiB`, `32GB`. None if the text is not a size.
pub(crate) fn parse_size(text: &str) -> Option<usize> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    let unit = match text[digits..].trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" | "k" => 1 << 10,
        "mib" | "m" => 1 << 20,
        "gib" | "g" => 1 << 30,
        "tib" | "t" => 1_u64 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => return None,
    };
    let bytes = number * unit as f64;
    (bytes >= 1.0 && bytes < (1_u64 << 46) as f64).then_some(bytes as usize)
}

/// Writes bytes in the largest binary unit that leaves at most two decimals of interest: `96 GiB`, `1.5 MiB`.
pub(crate) fn format_size(bytes: usize) -> String {
    let (mut value, mut unit) = (bytes as f64, "bytes");
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = larger;
    }
    let digits = format!("{value:.2}");
    format!("{} {unit}", digits.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_and_written() {
        for (text, bytes, written) in [
            ("64", 64, "64 bytes"),
            ("4GiB", 4 << 30, "4 GiB"),
            (" 1.5 MiB", 3 << 19, "1.5 MiB"),
            ("512m", 512 << 20, "512 MiB"),
            ("32GB", 32_000_000_000, "29.8 GiB"),
        ] {
            assert_eq!(parse_size(text), Some(bytes), "{text}");
            assert_eq!(format_size(bytes), written);
        }
        for nonsense in ["", "GiB", "4 apples", "-1", "0", "1e30", "1..2GiB", "99999TiB"] {
            assert_eq!(parse_size(nonsense), None, "{nonsense}");
        }
    }
}
