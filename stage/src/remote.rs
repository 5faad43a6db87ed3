//! Stores that are not of this machine, by their URLs and the settings of the environment, and of
//! the AWS tools' files.

use crate::checksums::Listening;
use crate::error::{Error, Result};
use crate::profiles::{Profile, Settings};
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::multipart::MultipartStore;
use object_store::path::Path as Key;
use object_store::{Certificate, ClientOptions, ObjectStore, ObjectStoreScheme, RetryConfig};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use url::Url;

/// What variables of the environment the stores' own tools read.
const ENVIRONMENT: [&str; 3] = ["AWS_", "GOOGLE_", "AZURE_"];

/// Those that name an endpoint of S3.
const ENDPOINTS: [&str; 3] = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];

/// How long a request may take that brings a part out, and how long it is tried again: all parts
/// in flight share a line that may be slow, and one that is not done counts for nothing.
const SENDING: Duration = Duration::from_secs(600);

/// How the names of the buckets of S3 Express end, whose ETags are no MD5.
const EXPRESS: &str = "--x-s3";

/// A place in such a store.
pub struct Remote {
    pub store: Arc<dyn ObjectStore>,
    /// The same, where uploads in parts have names by which they can go on.
    pub multipart: Option<Arc<dyn MultipartStore>>,
    pub prefix: Key,
    /// Whether it tells what it has: a web server does not.
    pub lists: bool,
}

/// A builder's store, with the settings of the environment that it knows.
macro_rules! built {
    ($builder:expr, $url:expr, $connector:expr, $options:expr, $retry:expr) => {{
        let builder = $builder.with_url($url).with_client_options($options).with_retry($retry);
        let builder = builder.with_http_connector($connector);
        let settings = std::env::vars().filter(|(name, _)| ENVIRONMENT.iter().any(|ours| name.starts_with(ours)));
        let builder = settings.fold(builder, |builder, (name, value)| match name.to_ascii_lowercase().parse() {
            Ok(key) => builder.with_config(key, value),
            Err(_) => builder,
        });
        Arc::new(builder.build()?)
    }};
}

impl Remote {
    /// The place that a URL names; `reads` whether objects and their checksums are read from it.
    ///
    /// # Errors
    /// [`Error::NoUrl`], or [`Error::Store`] where the store's settings are incomplete. `shown` is
    /// the URL for people.
    pub fn open(url: &Url, shown: &str, reads: bool) -> Result<Remote> {
        let (scheme, path) = ObjectStoreScheme::parse(url).map_err(|_| Error::NoUrl(shown.into()))?;
        let prefix = Key::parse(path).map_err(|error| Error::Store { name: shown.into(), source: error.into() })?;
        let profile = match scheme {
            ObjectStoreScheme::AmazonS3 => Profile::of_environment()?,
            _ => Profile::default(),
        };
        let authorities = authorities(profile.authorities.as_deref())?;
        let built = Remote::built(url, &scheme, prefix, reads, profile.settings, authorities);
        built.map_err(Error::store(shown))?.ok_or_else(|| Error::NoUrl(shown.into()))
    }

    fn built(
        url: &Url,
        scheme: &ObjectStoreScheme,
        prefix: Key,
        reads: bool,
        settings: Settings,
        authorities: Vec<Certificate>,
    ) -> object_store::Result<Option<Remote>> {
        // What is read goes on from where it ended, so that half a minute will do.
        let options = match reads {
            true => ClientOptions::default(),
            false => ClientOptions::default().with_timeout(SENDING),
        };
        let options = authorities.into_iter().fold(options, ClientOptions::with_root_certificate);
        let retry = if reads { RetryConfig::default() } else { RetryConfig { retry_timeout: SENDING, ..RetryConfig::default() } };
        let plain = Listening { tags: false };
        Ok(Some(match scheme {
            ObjectStoreScheme::AmazonS3 => {
                let tagged = Listening { tags: !url.host_str().is_some_and(|bucket| bucket.ends_with(EXPRESS)) };
                let options = if reads { Listening::asking(options) } else { options };
                // A plain endpoint is one that the user asked for.
                let endpoints = settings.iter().filter(|(name, _)| *name == "aws_endpoint").map(|(_, url)| url.clone());
                let mut endpoints = endpoints.chain(ENDPOINTS.iter().filter_map(|name| std::env::var(name).ok()));
                let options = options.with_allow_http(endpoints.any(|url| url.starts_with("http://")));
                let builder = settings.into_iter().try_fold(AmazonS3Builder::new(), |builder, (name, value)| {
                    Ok::<_, object_store::Error>(builder.with_config(name.parse()?, value))
                })?;
                let store = built!(builder, url.as_str(), tagged, options, retry);
                Remote { store: store.clone(), multipart: Some(store), prefix, lists: true }
            }
            ObjectStoreScheme::GoogleCloudStorage => {
                let store = built!(GoogleCloudStorageBuilder::new(), url.as_str(), plain, options, retry);
                Remote { store: store.clone(), multipart: Some(store), prefix, lists: true }
            }
            ObjectStoreScheme::MicrosoftAzure => {
                let store = built!(MicrosoftAzureBuilder::new(), url.as_str(), plain, options, retry);
                Remote { store: store.clone(), multipart: Some(store), prefix, lists: true }
            }
            ObjectStoreScheme::Http => {
                let store = built!(HttpBuilder::new(), &url[..url::Position::BeforePath], plain, options, retry);
                Remote { store, multipart: None, prefix, lists: false }
            }
            _ => return Ok(None),
        }))
    }
}

/// The certificates in a file, which count besides those of the platform.
fn authorities(path: Option<&Path>) -> Result<Vec<Certificate>> {
    let Some(path) = path else { return Ok(Vec::new()) };
    let text = std::fs::read(path).map_err(Error::path(path, "read it"))?;
    let found = Certificate::from_pem_bundle(&text).unwrap_or_default();
    if found.is_empty() { Err(Error::Authorities(path.into())) } else { Ok(found) }
}
