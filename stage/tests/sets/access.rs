//! Credentials and certificates, where the stores' own tools have them.

use crate::hydrate::URL;
use crate::store::Store;
use crate::{ends_well, fails, files, gpunvme, set};
use gpunvme_tests::mounted::Mounted;
use gpunvme_tests::needs_mount;
use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// `hydrate` in an environment that says nothing of a store, with a home of its own.
fn hydrate(home: &Path, folder: &Path) -> Command {
    let mut command = gpunvme("hydrate");
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("AWS_") || name.starts_with("SSL_")) {
        command.env_remove(name);
    }
    command.env("HOME", home).arg(URL).arg(folder);
    command
}

fn fill(store: &Store) {
    store.state().objects = set(1).into_iter().map(|(name, bytes)| (format!("set/{name}"), bytes)).collect();
}

#[test]
fn profiles_of_the_aws_tools_say_where_and_by_which_key() {
    needs_mount!();
    let (volume, store, home) = (Mounted::new(), Store::new(), tempfile::tempdir().unwrap());
    fill(&store);
    fs::create_dir(home.path().join(".aws")).unwrap();
    let config = format!(
        "[default]\nregion = here\n[profile lab]\nregion = there\nendpoint_url = {}\n[profile far]\nsso_session = x\n",
        store.url("")
    );
    fs::write(home.path().join(".aws/config"), config).unwrap();
    let keys = "[lab]\naws_access_key_id = KEYOFTHEPROFILE\naws_secret_access_key = SECRETOFTHETEST\n";
    fs::write(home.path().join(".aws/credentials"), keys).unwrap();
    let output = hydrate(home.path(), &volume.path("set")).env("AWS_PROFILE", "lab").env("RUST_LOG", "trace").output().unwrap();
    ends_well(&output);
    assert!(!String::from_utf8_lossy(&output.stderr).contains("SECRETOFTHETEST"));
    assert_eq!(files(&volume.path("set")), set(1));
    let signed = store.state().signed.clone().unwrap();
    assert!(signed.contains("Credential=KEYOFTHEPROFILE/") && signed.contains("/there/s3/"), "{signed}");
    // The environment counts more.
    let mut command = hydrate(home.path(), &volume.path("again"));
    command.env("AWS_PROFILE", "lab").env("AWS_ACCESS_KEY_ID", "OTHERKEY").env("AWS_SECRET_ACCESS_KEY", "x");
    ends_well(&command.env("AWS_REGION", "elsewhere").output().unwrap());
    let signed = store.state().signed.clone().unwrap();
    assert!(signed.contains("Credential=OTHERKEY/") && signed.contains("/elsewhere/s3/"), "{signed}");
    for (profile, what) in [("far", "single sign-on"), ("none", "there is no profile none")] {
        let said = fails(&hydrate(home.path(), &volume.path(profile)).env("AWS_PROFILE", profile).output().unwrap());
        assert!(said.contains(what) && !volume.path(profile).exists(), "{said}");
    }
}

/// The metadata of a machine in a cloud, version 2: a token first, then the role and its key.
/// Returns where it serves, and the requests that came.
fn machine_metadata() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let requests = Arc::new(Mutex::new(Vec::new()));
    let seen = requests.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut stream = BufReader::new(stream);
            let mut lines = Vec::new();
            loop {
                let mut line = String::new();
                stream.read_line(&mut line).unwrap();
                match line.trim_end() {
                    "" => break,
                    line => lines.push(line.to_owned()),
                }
            }
            let Some(request) = lines.first().cloned() else { continue };
            let has_token = lines.iter().any(|line| line.eq_ignore_ascii_case("x-aws-ec2-metadata-token: TOKENOFTHEMACHINE"));
            let (status, body) = match request.trim_end_matches(" HTTP/1.1") {
                "PUT /latest/api/token" => ("200 OK", "TOKENOFTHEMACHINE".to_owned()),
                _ if !has_token => ("401 Unauthorized", String::new()),
                "GET /latest/meta-data/iam/security-credentials/" => ("200 OK", "trainer".to_owned()),
                "GET /latest/meta-data/iam/security-credentials/trainer" => (
                    "200 OK",
                    r#"{"Code":"Success","Type":"AWS-HMAC","AccessKeyId":"KEYOFTHEROLE","SecretAccessKey":"SECRETOFTHEROLE",
                        "Token":"SESSIONOFTHEROLE","LastUpdated":"2026-11-25T08:00:00Z","Expiration":"2126-11-25T08:00:00Z"}"#
                        .to_owned(),
                ),
                _ => ("404 Not Found", String::new()),
            };
            seen.lock().unwrap().push(request);
            let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
            stream.get_mut().write_all(answer.as_bytes()).unwrap();
        }
    });
    (address, requests)
}

#[test]
fn a_machine_that_has_a_role_needs_no_key() {
    needs_mount!();
    let (volume, store, home) = (Mounted::new(), Store::new(), tempfile::tempdir().unwrap());
    fill(&store);
    let (metadata, requests) = machine_metadata();
    let mut command = hydrate(home.path(), &volume.path("set"));
    command.env("AWS_ENDPOINT_URL", store.url("")).env("AWS_REGION", "here").env("AWS_METADATA_ENDPOINT", metadata);
    let output = command.env("RUST_LOG", "trace").output().unwrap();
    ends_well(&output);
    assert_eq!(files(&volume.path("set")), set(1));
    let signed = store.state().signed.clone().unwrap();
    let session = store.state().session.clone();
    assert!(signed.contains("Credential=KEYOFTHEROLE/") && session.as_deref() == Some("SESSIONOFTHEROLE"), "{signed}");
    // Once for all requests to the store, and told to no log.
    assert_eq!(requests.lock().unwrap().len(), 3, "{requests:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(["SECRETOFTHEROLE", "SESSIONOFTHEROLE", "TOKENOFTHEMACHINE"].iter().all(|secret| !said.contains(secret)), "{said}");
}

/// An authority and a certificate of this machine's that it made, in a folder.
pub fn certified(folder: &Path) -> Arc<ServerConfig> {
    let openssl = |arguments: &str| {
        let output = Command::new("openssl").args(arguments.split_whitespace()).current_dir(folder).output().unwrap();
        assert!(output.status.success(), "{}", gpunvme_tests::mounted::text(&output));
    };
    fs::write(folder.join("names"), "subjectAltName = IP:127.0.0.1\n").unwrap();
    const KEY: &str = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    openssl(&format!("req -x509 {KEY} -keyout ca.key -out ca.pem -days 2 -subj /CN=authority"));
    openssl(&format!("req {KEY} -keyout key.pem -out request.pem -subj /CN=store"));
    openssl("x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out store.pem");
    let chain = CertificateDer::pem_file_iter(folder.join("store.pem")).unwrap().map(Result::unwrap).collect();
    let key = PrivateKeyDer::from_pem_file(folder.join("key.pem")).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    Arc::new(builder.with_no_client_auth().with_single_cert(chain, key).unwrap())
}

#[test]
fn a_store_is_trusted_if_an_authority_of_this_machine_vouches_for_it() {
    needs_mount!();
    let (volume, home) = (Mounted::new(), tempfile::tempdir().unwrap());
    let store = Store::secure(certified(home.path()));
    fill(&store);
    let authority = home.path().join("ca.pem");
    let run = |name: &str, variables: &[(&str, &Path)]| {
        let mut command = hydrate(home.path(), &volume.path(name));
        command.env("AWS_ENDPOINT_URL", store.url("")).env("AWS_REGION", "here");
        command.env("AWS_ACCESS_KEY_ID", "KEY").env("AWS_SECRET_ACCESS_KEY", "SECRET");
        command.envs(variables.iter().copied()).output().unwrap()
    };
    let begun = Instant::now();
    let said = fails(&run("refused", &[]));
    assert!(said.contains("not trusted") && said.contains("SSL_CERT_FILE"), "{said}");
    assert!(begun.elapsed() < Duration::from_secs(20), "asking again does not help");
    assert!(store.state().reads.is_empty() && !volume.path("refused").exists());
    // As other programs of the platform take it, and as the AWS tools do.
    for variable in ["SSL_CERT_FILE", "AWS_CA_BUNDLE"] {
        ends_well(&run(variable, &[(variable, &authority)]));
        assert_eq!(files(&volume.path(variable)), set(1));
    }
    let said = fails(&run("none", &[("AWS_CA_BUNDLE", Path::new("/dev/null"))]));
    assert!(said.contains("/dev/null has no certificates"), "{said}");
}
