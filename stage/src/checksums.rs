//! The checksums that stores have of their objects: what an answer's headers say, and the sums of
//! what arrived.
//!
//! The library that speaks with the stores hands on few of the headers, and the extensions of an
//! answer: [`Listening`] puts a checksum there.

use crate::error::{Error, Result};
use async_trait::async_trait;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::CrcAlgorithm;
use md5::Md5;
use object_store::HeaderMap;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::{ClientOptions, HeaderValue};
use sha2::Sha256;

/// How a checksum is made, the cheapest first: only one of those that are offered is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Crc32c,
    Crc64Nvme,
    Crc32,
    Sha256,
    Md5,
}

/// The headers of S3 that say one, of the whole object or of its parts.
const OF_S3: [(&str, Kind); 4] = [
    ("x-amz-checksum-crc32c", Kind::Crc32c),
    ("x-amz-checksum-crc64nvme", Kind::Crc64Nvme),
    ("x-amz-checksum-crc32", Kind::Crc32),
    ("x-amz-checksum-sha256", Kind::Sha256),
];

impl Kind {
    /// Its name for people.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Crc32c => "CRC32C",
            Kind::Crc64Nvme => "CRC64-NVME",
            Kind::Crc32 => "CRC32",
            Kind::Sha256 => "SHA-256",
            Kind::Md5 => "MD5",
        }
    }

    /// Bytes of a sum.
    fn len(self) -> usize {
        match self {
            Kind::Crc32c | Kind::Crc32 => 4,
            Kind::Crc64Nvme => 8,
            Kind::Md5 => 16,
            Kind::Sha256 => 32,
        }
    }

    /// How its sums of parts give that of the whole; none where they do not.
    fn of_parts(self) -> Option<CrcAlgorithm> {
        match self {
            Kind::Crc32c => Some(CrcAlgorithm::Crc32Iscsi),
            Kind::Crc64Nvme => Some(CrcAlgorithm::Crc64Nvme),
            Kind::Crc32 => Some(CrcAlgorithm::Crc32IsoHdlc),
            Kind::Sha256 | Kind::Md5 => None,
        }
    }

    /// The sum of a part, from which that of the whole is [`combined`](Kind::combined).
    pub fn part(self, bytes: &[u8]) -> Option<u64> {
        Some(crc_fast::checksum(self.of_parts()?, bytes))
    }

    /// The sum of parts, with their lengths, in their order.
    pub fn combined(self, parts: impl Iterator<Item = (u64, u64)>) -> Option<Vec<u8>> {
        let how = self.of_parts()?;
        let whole = parts.reduce(|(a, before), (b, len)| (crc_fast::checksum_combine(how, a, b, len), before + len))?;
        Some(whole.0.to_be_bytes()[8 - self.len()..].to_vec())
    }
}

/// The sum of bytes that come in their order.
pub enum Sum {
    Crc(Kind, crc_fast::Digest),
    Sha256(Sha256),
    Md5(Md5),
}

impl Sum {
    /// Of no bytes.
    pub fn new(kind: Kind) -> Sum {
        match kind.of_parts() {
            Some(how) => Sum::Crc(kind, crc_fast::Digest::new(how)),
            None if kind == Kind::Md5 => Sum::Md5(Md5::default()),
            None => Sum::Sha256(Sha256::default()),
        }
    }

    /// These come next.
    pub fn add(&mut self, bytes: &[u8]) {
        match self {
            Sum::Crc(_, digest) => digest.update(bytes),
            Sum::Sha256(digest) => sha2::Digest::update(digest, bytes),
            Sum::Md5(digest) => md5::Digest::update(digest, bytes),
        }
    }

    /// All have come.
    pub fn finish(self) -> Vec<u8> {
        match self {
            Sum::Crc(kind, digest) => digest.finalize().to_be_bytes()[8 - kind.len()..].to_vec(),
            Sum::Sha256(digest) => sha2::Digest::finalize(digest).to_vec(),
            Sum::Md5(digest) => md5::Digest::finalize(digest).to_vec(),
        }
    }
}

/// How many bytes are copied and summed at a time, so that they are read from memory once.
const BLOCK: usize = 64 << 10;

/// The CRC32C of bytes that come in their order.
#[derive(Clone)]
pub struct Crc32c(crc_fast::Digest);

impl Crc32c {
    /// Of no bytes.
    pub fn new() -> Crc32c {
        Crc32c(crc_fast::Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// These come next.
    pub fn add(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// These come next, and are copied, to where there is as much room.
    pub fn copy(&mut self, room: &mut [u8], bytes: &[u8]) {
        for (room, bytes) in room.chunks_mut(BLOCK).zip(bytes.chunks(BLOCK)) {
            room.copy_from_slice(bytes);
            self.0.update(bytes);
        }
    }

    /// All have come.
    pub fn finish(self) -> u32 {
        self.0.finalize() as u32
    }
}

/// What an object's checksum has to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    pub kind: Kind,
    sum: Vec<u8>,
    /// Who says so.
    by: &'static str,
}

impl Expected {
    /// The CRC32C that a set's manifest has.
    pub fn published(crc32c: u32) -> Expected {
        Expected { kind: Kind::Crc32c, sum: crc32c.to_be_bytes().into(), by: "the set's manifest" }
    }

    /// Compares it with the sum of what arrived as `name`.
    ///
    /// # Errors
    /// [`Error::Checksum`].
    pub fn check(&self, name: &str, found: &[u8]) -> Result<()> {
        if self.sum == found {
            return Ok(());
        }
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let (kind, by, expected, found) = (self.kind.name(), self.by, hex(&self.sum), hex(found));
        Err(Error::Checksum { name: name.into(), kind, found, by, expected })
    }

    /// What the headers of an answer say of a whole object; with `tags` its ETag is the MD5 of it
    /// unless it was sent in parts or is encrypted.
    fn of(headers: &HeaderMap, tags: bool) -> Option<Expected> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let decoded = |kind: Kind, text: &str| {
            BASE64_STANDARD.decode(text).ok().filter(|sum| sum.len() == kind.len()).map(|sum| (kind, sum))
        };
        let mut offered = Vec::new();
        if text("x-amz-checksum-type") != Some("COMPOSITE") {
            // The sum of parts' sums ends in their number, and cannot be decoded.
            offered.extend(OF_S3.iter().filter_map(|&(name, kind)| decoded(kind, text(name)?)));
        }
        // Of what is stored, which may be sent unpacked.
        if text("x-goog-stored-content-encoding").is_none_or(|encoding| encoding == "identity") {
            for sum in
                headers.get_all("x-goog-hash").iter().filter_map(|value| value.to_str().ok()).flat_map(|text| text.split(','))
            {
                offered.extend(match sum.trim().split_once('=') {
                    Some(("crc32c", text)) => decoded(Kind::Crc32c, text),
                    Some(("md5", text)) => decoded(Kind::Md5, text),
                    _ => None,
                });
            }
        }
        offered.extend(text("content-md5").and_then(|text| decoded(Kind::Md5, text)));
        let is_encrypted = text("x-amz-server-side-encryption").is_some_and(|how| how.starts_with("aws:kms"))
            || headers.contains_key("x-amz-server-side-encryption-customer-algorithm");
        if tags && !is_encrypted {
            offered.extend(text("etag").and_then(of_hex).map(|sum| (Kind::Md5, sum)));
        }
        let (kind, sum) = offered.into_iter().min_by_key(|(kind, _)| *kind)?;
        Some(Expected { kind, sum, by: "the store" })
    }
}

/// The MD5 that an ETag is: 32 hexadecimal digits in quotation marks.
fn of_hex(tag: &str) -> Option<Vec<u8>> {
    let digits = tag.strip_prefix('"')?.strip_suffix('"')?;
    if digits.len() != 32 || !digits.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    (0..16).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()).collect()
}

/// Speaks with a store as [`ReqwestConnector`] does, and gives each answer that is of a whole
/// object an extension: [`Expected`].
#[derive(Clone, Copy, Debug)]
pub struct Listening {
    /// Whether ETags may be MD5.
    pub tags: bool,
}

impl Listening {
    /// What asks S3 for the checksums; it has to be signed, and so is a header of all requests.
    pub fn asking(options: ClientOptions) -> ClientOptions {
        let mut headers = HeaderMap::new();
        headers.insert("x-amz-checksum-mode", HeaderValue::from_static("ENABLED"));
        options.with_default_headers(headers)
    }
}

impl HttpConnector for Listening {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        // What asks for checksums is a header of the requests that sign it. The client would add
        // it to those that do not, and S3 refuses what is not signed.
        let options = options.clone().with_default_headers(HeaderMap::new());
        let client = ReqwestConnector::default().connect(&options)?;
        Ok(HttpClient::new(Service { client, tags: self.tags }))
    }
}

#[derive(Debug)]
struct Service {
    client: HttpClient,
    tags: bool,
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let mut answer = self.client.execute(request).await.map_err(|error| match untrusted(&error) {
            // Asking again does not help.
            Some(why) => HttpError::new(HttpErrorKind::Unknown, Untrusted(why)),
            None => error,
        })?;
        // An answer of 206 has the sum of a part, or none.
        if answer.status() == 200
            && let Some(expected) = Expected::of(answer.headers(), self.tags)
        {
            answer.extensions_mut().insert(expected);
        }
        Ok(answer)
    }
}

/// A store whose certificate no authority of this machine vouches for.
#[derive(Debug, thiserror::Error)]
#[error("its certificate is not trusted ({0}): SSL_CERT_FILE names a file of authorities that are")]
struct Untrusted(rustls::Error);

/// What is wrong with the store's certificate, if that is the error.
fn untrusted(error: &HttpError) -> Option<rustls::Error> {
    let mut next: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = next {
        let inner = error.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        let found = inner.and_then(|inner| inner.downcast_ref()).or_else(|| error.downcast_ref());
        if let Some(found @ rustls::Error::InvalidCertificate(_)) = found {
            return Some(found.clone());
        }
        // That of the system skips what it is made of.
        next = inner.map(|inner| inner as &(dyn std::error::Error + 'static)).or_else(|| error.source());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &[u8] = b"123456789";

    fn said(headers: &[(&'static str, &str)]) -> Option<(Kind, Vec<u8>)> {
        let headers: HeaderMap = headers.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect();
        Expected::of(&headers, true).map(|expected| (expected.kind, expected.sum))
    }

    fn sum(kind: Kind, bytes: &[u8]) -> Vec<u8> {
        let mut sum = Sum::new(kind);
        sum.add(&bytes[..4]);
        sum.add(&bytes[4..]);
        sum.finish()
    }

    #[test]
    fn sums_are_those_that_stores_make() {
        // The check values of the catalogue of CRCs, and of RFC 1321 and FIPS 180.
        assert_eq!(sum(Kind::Crc32c, TEXT), 0xe306_9283_u32.to_be_bytes());
        assert_eq!(sum(Kind::Crc32, TEXT), 0xcbf4_3926_u32.to_be_bytes());
        assert_eq!(sum(Kind::Crc64Nvme, TEXT), 0xae8b_1486_0a79_9888_u64.to_be_bytes());
        assert_eq!(Some(sum(Kind::Md5, TEXT)), of_hex("\"25f9e794323b453885f5181f1b624d0b\""));
        assert_eq!(sum(Kind::Sha256, TEXT)[..4], [0x15, 0xe2, 0xb0, 0xd3]);
        for kind in [Kind::Crc32c, Kind::Crc32, Kind::Crc64Nvme] {
            let parts = TEXT.chunks(4).map(|part| (kind.part(part).unwrap(), part.len() as u64));
            assert_eq!(kind.combined(parts), Some(sum(kind, TEXT)));
        }
        assert_eq!(Kind::Md5.part(TEXT), None);
    }

    #[test]
    fn the_cheapest_of_what_is_said_counts() {
        let tag = ("etag", "\"25f9e794323b453885f5181f1b624d0b\"");
        let md5 = Some((Kind::Md5, sum(Kind::Md5, TEXT)));
        assert_eq!(said(&[tag]), md5);
        assert_eq!(said(&[tag, ("x-amz-checksum-crc32c", "4waSgw==")]), Some((Kind::Crc32c, sum(Kind::Crc32c, TEXT))));
        assert_eq!(said(&[("x-goog-hash", "crc32c=4waSgw==,md5=JfnnlDI7RTiF9RgfG2JNCw==")]).unwrap().0, Kind::Crc32c);
        assert_eq!(said(&[("content-md5", "JfnnlDI7RTiF9RgfG2JNCw==")]), md5);
        // What says nothing of the whole object's bytes, or is no checksum.
        for nothing in [
            vec![("etag", "\"25f9e794323b453885f5181f1b624d0b-2\"")],
            vec![tag, ("x-amz-server-side-encryption", "aws:kms")],
            vec![tag, ("x-amz-server-side-encryption-customer-algorithm", "AES256")],
            vec![("x-amz-checksum-crc32c", "4waSgw==-3")],
            vec![("x-amz-checksum-crc32c", "4waSgw=="), ("x-amz-checksum-type", "COMPOSITE")],
            vec![("x-amz-checksum-sha256", "4waSgw==")],
            vec![("x-goog-hash", "crc32c=4waSgw=="), ("x-goog-stored-content-encoding", "gzip")],
            vec![("etag", "\"zzf9e794323b453885f5181f1b624d0b\"")],
            vec![("x-goog-hash", "crc32c,=,md5=?")],
        ] {
            assert_eq!(said(&nothing), None, "{nothing:?}");
        }
    }
}
