//! The job's secret and how it is proven without being sent.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Separates this use of blake3 from every other.
const CONTEXT: &str = "warpweft bootstrap 2026 job token";

/// 32 bytes that are used once.
pub(crate) type Nonce = [u8; 32];

/// A keyed hash over what both sides know.
pub(crate) type Proof = [u8; 32];

/// The secret of a job: whoever has it may join.
///
/// It never travels; members and rank 0 prove to each other that they have it.
/// What is sent afterwards is neither encrypted nor signed, so a network that others can change needs a tunnel.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// The token that everybody has: whoever reaches the port may join.
    pub fn open() -> Self {
        Self(String::new())
    }

    /// 256 random bits.
    ///
    /// # Errors
    ///
    /// The system has no random bytes to give.
    pub fn random() -> std::io::Result<Self> {
        Ok(Self(hexadecimal(&nonce()?)))
    }

    /// The text, for the environment of another member.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    pub(crate) fn prove(&self, who: &str, parts: &[&[u8]]) -> Proof {
        *self.hash(who, parts).as_bytes()
    }

    /// Compares in constant time, as blake3's `Hash` does.
    pub(crate) fn verify(&self, who: &str, parts: &[&[u8]], proof: &Proof) -> bool {
        self.hash(who, parts) == blake3::Hash::from_bytes(*proof)
    }

    fn hash(&self, who: &str, parts: &[&[u8]]) -> blake3::Hash {
        let key = blake3::derive_key(CONTEXT, self.0.as_bytes());
        let mut hasher = blake3::Hasher::new_keyed(&key);
        for part in [who.as_bytes()].iter().chain(parts) {
            // With its length, so that no two lists of parts read the same.
            hasher.update(&(part.len() as u64).to_le_bytes());
            hasher.update(part);
        }
        hasher.finalize()
    }
}

impl From<&str> for Token {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}

/// Names one run of a job, so that leftovers of another are told apart.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RunId(String);

impl RunId {
    /// Longer names are cut to this many bytes' worth of characters.
    const LONGEST: usize = 128;

    /// A run with a random name.
    ///
    /// # Errors
    ///
    /// The system has no random bytes to give.
    pub fn random() -> std::io::Result<Self> {
        Ok(Self(hexadecimal(&nonce()?[..16])))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for RunId {
    fn from(text: &str) -> Self {
        let end = (0..=Self::LONGEST.min(text.len())).rev().find(|&at| text.is_char_boundary(at));
        Self(text[..end.unwrap_or(0)].to_owned())
    }
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RunId({})", self.0)
    }
}

pub(crate) fn nonce() -> std::io::Result<Nonce> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(std::io::Error::other)?;
    Ok(bytes)
}

pub(crate) fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proof_holds_for_its_parts_and_token_alone() {
        let token = Token::from("secret");
        let proof = token.prove("member", &[b"ab", b"c"]);
        assert!(token.verify("member", &[b"ab", b"c"], &proof));
        assert!(!token.verify("hub", &[b"ab", b"c"], &proof));
        assert!(!token.verify("member", &[b"a", b"bc"], &proof));
        assert!(!Token::open().verify("member", &[b"ab", b"c"], &proof));
    }

    #[test]
    fn tokens_do_not_show_themselves() {
        assert!(!format!("{:?}", Token::from("secret")).contains("secret"));
    }

    #[test]
    fn runs_are_cut_between_characters() {
        let run = RunId::from("é".repeat(100).as_str());
        assert_eq!(run.as_str().len(), 128);
        assert_eq!(RunId::from(format!("a{}", "é".repeat(100)).as_str()).as_str().len(), 127);
    }
}
