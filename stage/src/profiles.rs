//! The files of the AWS tools, `~/.aws/config` and `~/.aws/credentials`: what the profile that
//! counts says, where the environment does not say it.

use crate::error::{Error, Result};
use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Most bytes that are read of such a file.
const LONGEST: u64 = 4 << 20;

/// How credentials can be had that this program does not take, by the setting that says so.
const OTHERS: [(&str, &str); 7] = [
    ("sso_session", "single sign-on"),
    ("sso_start_url", "single sign-on"),
    ("login_session", "a login of the AWS command line"),
    ("source_profile", "a role that another profile takes"),
    ("credential_source", "a role that the machine takes"),
    ("role_arn", "a role"),
    ("mfa_serial", "a role with a second factor"),
];

/// Names of settings, as the library that speaks with S3 has them, and their values.
pub type Settings = Vec<(&'static str, String)>;

/// What the profile says.
#[derive(Debug, Default)]
pub struct Profile {
    pub settings: Settings,
    /// A file with the certificates that count besides those of the platform.
    pub authorities: Option<PathBuf>,
}

type Section = BTreeMap<String, String>;
type Sections = BTreeMap<String, Section>;

/// The profile's section of a file, and where that is.
type Found<'a> = (Option<&'a Section>, Option<PathBuf>);

/// A variable of the environment, unless it is empty.
type Variable<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Profile {
    /// That of the environment: `AWS_PROFILE`, or `default`.
    ///
    /// # Errors
    /// [`Error::NoProfile`], [`Error::Profile`], [`Error::ProfileLine`], [`Error::Path`]. None
    /// says what a file says.
    pub fn of_environment() -> Result<Profile> {
        Profile::of(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn of(variable: Variable<'_>) -> Result<Profile> {
        let paths = [("AWS_CONFIG_FILE", "config"), ("AWS_SHARED_CREDENTIALS_FILE", "credentials")];
        let [config_path, credentials_path] = paths.map(|(name, file)| path(variable, name, file));
        let (config, credentials) = (read(config_path.as_deref())?, read(credentials_path.as_deref())?);
        let named = variable("AWS_PROFILE").or_else(|| variable("AWS_DEFAULT_PROFILE"));
        let name = named.as_deref().unwrap_or("default");
        let section = if name == "default" { name.to_owned() } else { format!("profile {name}") };
        let in_config = config.get(&section).or_else(|| config.get("profile default").filter(|_| name == "default"));
        let in_credentials = credentials.get(name);
        if let (None, None, Some(_)) = (in_config, in_credentials, &named) {
            return Err(Error::NoProfile {
                name: name.into(),
                paths: [config_path, credentials_path].into_iter().flatten().collect(),
            });
        }
        let setting = |key: &str| in_config.and_then(|found| found.get(key)).filter(|value| !value.is_empty()).cloned();
        let is_said = |names: &[&str]| names.iter().any(|name| variable(name).is_some());
        let mut found = Profile::default();
        if !is_said(&["AWS_REGION", "AWS_DEFAULT_REGION"]) {
            found.settings.extend(setting("region").map(|region| ("aws_region", region)));
        }
        let ignored = variable("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS").or_else(|| setting("ignore_configured_endpoint_urls"));
        let is_ignored = ignored.is_some_and(|ignored| ignored.eq_ignore_ascii_case("true"));
        if !is_ignored && !is_said(&["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]) {
            let services = setting("services").and_then(|name| config.get(&format!("services {name}")));
            let of_s3 = services.and_then(|services| services.get("s3.endpoint_url")).cloned();
            found.settings.extend(of_s3.or_else(|| setting("endpoint_url")).map(|url| ("aws_endpoint", url)));
        }
        found.authorities = variable("AWS_CA_BUNDLE").or_else(|| setting("ca_bundle")).map(|text| expanded(variable, &text));
        let is_unsigned = variable("AWS_SKIP_SIGNATURE").is_some_and(|skip| skip.eq_ignore_ascii_case("true"));
        if !is_unsigned && !is_said(&["AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"]) {
            let files = [(in_config, config_path), (in_credentials, credentials_path)];
            found.settings.extend(keys(name, files)?);
        }
        Ok(found)
    }
}

/// The credentials of a profile, in the order in which the AWS tools look for them.
fn keys(name: &str, files: [Found<'_>; 2]) -> Result<Settings> {
    let [(in_config, config), (in_credentials, credentials)] = files;
    let of = |section: Option<&Section>, key: &str| section?.get(key).cloned().filter(|value| !value.is_empty());
    let wrong = |path: &Option<PathBuf>, what| Error::Profile { name: name.into(), path: path.clone().unwrap_or_default(), what };
    for (section, path) in [(in_config, &config), (in_credentials, &credentials)] {
        if let (Some(role), Some(token)) = (of(section, "role_arn"), of(section, "web_identity_token_file")) {
            let session = of(section, "role_session_name").map(|session| ("aws_role_session_name", session));
            return Ok([("aws_role_arn", role), ("aws_web_identity_token_file", token)].into_iter().chain(session).collect());
        }
        if let Some((_, what)) = OTHERS.iter().find(|(key, _)| of(section, key).is_some()) {
            return Err(wrong(path, what));
        }
    }
    for (section, path) in [(in_credentials, &credentials), (in_config, &config)] {
        match (of(section, "aws_access_key_id"), of(section, "aws_secret_access_key")) {
            (Some(key), Some(secret)) => {
                let token = of(section, "aws_session_token").map(|token| ("aws_session_token", token));
                return Ok([("aws_access_key_id", key), ("aws_secret_access_key", secret)].into_iter().chain(token).collect());
            }
            (None, None) => {}
            _ => return Err(wrong(path, "one half of a key: it needs aws_access_key_id and aws_secret_access_key")),
        }
        // It counts after what is written in the file of credentials.
        let program = [(in_config, &config), (in_credentials, &credentials)];
        if let Some((_, path)) = program.into_iter().find(|(section, _)| of(*section, "credential_process").is_some()) {
            return Err(wrong(path, "another program"));
        }
    }
    Ok(Settings::new())
}

/// Where one of the files is.
fn path(variable: Variable<'_>, name: &str, file: &str) -> Option<PathBuf> {
    match variable(name) {
        Some(path) => Some(expanded(variable, &path)),
        None => variable("HOME").map(|home| Path::new(&home).join(".aws").join(file)),
    }
}

/// A path in which `~` stands for the user's folder.
fn expanded(variable: Variable<'_>, path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), variable("HOME")) {
        (Some(rest), Some(home)) => Path::new(&home).join(rest),
        _ => path.into(),
    }
}

/// The sections of a file; none where there is no file.
fn read(path: Option<&Path>) -> Result<Sections> {
    let Some(path) = path else { return Ok(Sections::new()) };
    let mut text = Vec::new();
    match std::fs::File::open(path).and_then(|file| file.take(LONGEST).read_to_end(&mut text)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Sections::new()),
        read => read.map_err(Error::path(path, "read it"))?,
    };
    parse(&String::from_utf8_lossy(&text)).map_err(|line| Error::ProfileLine { path: path.into(), line })
}

/// The sections of a file's text, with their settings; those of a setting that has some itself
/// stand indented below it, and are `SETTING.NAME` here. Fails with the number of a line.
fn parse(text: &str) -> std::result::Result<Sections, usize> {
    let mut sections = Sections::new();
    let (mut section, mut above) = (None, None);
    for (line, number) in text.lines().zip(1_usize..) {
        let is_indented = line.starts_with([' ', '\t']);
        let line = [" #", " ;", "\t#", "\t;"].iter().fold(line, |line, mark| line.split(mark).next().unwrap_or(line)).trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[') {
            let name = name.split(']').next().filter(|_| line.contains(']')).ok_or(number)?;
            let name: Vec<_> = name.split_whitespace().map(|word| word.trim_matches(['"', '\''])).collect();
            let name = name.join(" ");
            sections.entry(name.clone()).or_default();
            (section, above) = (Some(name), None);
            continue;
        }
        let (key, value) = line.split_once('=').ok_or(number)?;
        let (key, value) = (key.trim().to_ascii_lowercase(), value.trim());
        let settings = sections.get_mut(section.as_ref().ok_or(number)?).ok_or(number)?;
        match (&above, is_indented) {
            (Some(above), true) => drop(settings.insert(format!("{above}.{key}"), value.into())),
            _ => {
                above = value.is_empty().then(|| key.clone());
                settings.insert(key, value.into());
            }
        }
    }
    Ok(sections)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is found with these variables and files.
    fn found(variables: &[(&str, &str)], config: &str, credentials: &str) -> Result<Profile> {
        let home = tempfile::tempdir().unwrap();
        std::fs::create_dir(home.path().join(".aws")).unwrap();
        std::fs::write(home.path().join(".aws/config"), config).unwrap();
        std::fs::write(home.path().join(".aws/credentials"), credentials).unwrap();
        let home = home.path().to_str().unwrap();
        Profile::of(&|name| match variables.iter().find(|(known, _)| *known == name) {
            Some((_, value)) => Some((*value).to_owned()),
            None => (name == "HOME").then(|| home.to_owned()),
        })
    }

    fn settings(variables: &[(&str, &str)], config: &str, credentials: &str) -> BTreeMap<&'static str, String> {
        found(variables, config, credentials).unwrap().settings.into_iter().collect()
    }

    const CONFIG: &str = "# of a user
[default]
region = here
s3 =
  max_concurrent_requests = 16
  endpoint_url = not this
endpoint_url = http://a  ; of all
[profile \"other one\"]
REGION=there
services = mine
ca_bundle = ~/ca.pem
[services mine]
s3 =
    endpoint_url = http://b
dynamodb =
    endpoint_url = http://c
";
    const CREDENTIALS: &str = "[default]
aws_access_key_id = A
aws_secret_access_key = B=+/;#
[other one]
aws_access_key_id=C
aws_secret_access_key = D
aws_session_token = E
";

    #[test]
    fn a_profile_says_what_the_environment_does_not() {
        let default = settings(&[], CONFIG, CREDENTIALS);
        assert_eq!((&*default["aws_region"], &*default["aws_endpoint"]), ("here", "http://a"));
        assert_eq!((&*default["aws_access_key_id"], &*default["aws_secret_access_key"]), ("A", "B=+/;#"));
        let other = settings(&[("AWS_PROFILE", "other one")], CONFIG, CREDENTIALS);
        assert_eq!((&*other["aws_region"], &*other["aws_endpoint"], &*other["aws_session_token"]), ("there", "http://b", "E"));
        let bundle = found(&[("AWS_PROFILE", "other one")], CONFIG, CREDENTIALS).unwrap().authorities.unwrap();
        assert!(bundle.is_absolute() && bundle.ends_with("ca.pem"));
        // What the environment says counts, and no half of it comes from a file.
        let said = [("AWS_ACCESS_KEY_ID", "X"), ("AWS_DEFAULT_REGION", "Y"), ("AWS_ENDPOINT_URL", "Z")];
        assert_eq!(settings(&said, CONFIG, CREDENTIALS).len(), 0);
        let ignored = settings(&[("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")], CONFIG, CREDENTIALS);
        assert!(!ignored.contains_key("aws_endpoint") && ignored.len() == 3);
        assert_eq!(settings(&[("AWS_SKIP_SIGNATURE", "true")], "", CREDENTIALS).len(), 0);
        // Keys in the file of settings, and files that are not there.
        assert_eq!(settings(&[], CREDENTIALS, "").len(), 2);
        assert_eq!(settings(&[("AWS_CONFIG_FILE", "/none"), ("AWS_SHARED_CREDENTIALS_FILE", "~/none")], "x", "x").len(), 0);
        let role = "[default]\nrole_arn = a\nweb_identity_token_file = /t";
        assert_eq!(settings(&[], role, "")["aws_web_identity_token_file"], "/t");
    }

    #[test]
    fn what_is_not_taken_is_said_by_name_and_no_secret_is() {
        for (config, credentials, what) in [
            ("[profile p]\nsso_session = s\naws_access_key_id = SECRET\naws_secret_access_key = SECRET", "", "single sign-on"),
            (
                "[profile p]\nsso_start_url = SECRET",
                "[p]\naws_access_key_id = SECRET\naws_secret_access_key = SECRET",
                "single sign-on",
            ),
            ("[profile p]\nrole_arn = a\nsource_profile = SECRET", "", "a role that another profile takes"),
            ("", "[p]\nrole_arn = a\ncredential_source = Ec2InstanceMetadata", "a role that the machine takes"),
            ("[profile p]\ncredential_process = SECRET", "", "another program"),
            ("[profile p]\nlogin_session = a", "", "a login"),
            ("", "[p]\naws_access_key_id = SECRET", "one half of a key"),
            ("[p]\nregion = a", "", "there is no profile p"),
            ("[profile p]\nregion = a\nSECRET", "", "line 3"),
            ("[profile p\nregion = a", "", "line 1"),
            ("region = SECRET", "", "line 1"),
        ] {
            let said = found(&[("AWS_PROFILE", "p")], config, credentials).unwrap_err().to_string();
            assert!(said.contains(what) && !said.contains("SECRET"), "{said}");
        }
        // A program is asked where no key is written in the file of credentials.
        let keys = "[p]\naws_access_key_id = A\naws_secret_access_key = B";
        assert_eq!(settings(&[("AWS_PROFILE", "p")], "[profile p]\ncredential_process = x", keys).len(), 2);
    }
}
