//! A folder is the same one however it is written.

use crate::{ends_well, files, gpunvme};
use std::fs;

#[test]
fn slashes_and_points_make_no_other_folder() {
    let here = tempfile::tempdir().unwrap();
    for (name, text) in [("v/one", "1"), ("v/sub/two", "2")] {
        fs::create_dir_all(here.path().join(name).parent().unwrap()).unwrap();
        fs::write(here.path().join(name), text).unwrap();
    }
    let (source, set, manifest) =
        (here.path().join("v"), here.path().join("set"), here.path().join("set/.gpunvme-stage/manifest"));
    let hydrated = |source: &str| {
        let output = gpunvme("hydrate").arg(source).arg(&set).current_dir(here.path().join("v/sub")).output().unwrap();
        ends_well(&output)
    };
    let absolute = source.display().to_string();
    assert!(hydrated(&absolute).contains("fetched: 2"));
    let spellings = [
        "..",
        "../../v",
        "../../v//",
        "./..",
        &format!("{absolute}/"),
        &format!("file://{absolute}/"),
        &format!("{absolute}/sub/.."),
    ];
    for spelling in spellings {
        assert!(hydrated(spelling).contains("fetched: 0"), "{spelling}");
    }
    // As earlier versions wrote it.
    let text = fs::read_to_string(&manifest).unwrap();
    let url = format!("file://{absolute}");
    assert!(text.contains(&url));
    fs::write(&manifest, text.replace(&format!("\"{url}\""), &format!("\"{url}/\""))).unwrap();
    assert!(hydrated(&absolute).contains("fetched: 0"));

    let published = |destination: &str| {
        let output = gpunvme("publish").arg(&source).arg(destination).current_dir(&source).output().unwrap();
        ends_well(&output)
    };
    let destination = here.path().join("new/x").display().to_string();
    assert!(published(&destination).contains("sent: 2"));
    for spelling in [&format!("{destination}/"), "../new/x", "sub/../../new//x/"] {
        assert!(published(spelling).contains("sent: 0"), "{spelling}");
    }
    assert_eq!(files(&here.path().join("new")).len(), 3);
}

#[test]
fn a_source_is_the_link_that_was_named() {
    let here = tempfile::tempdir().unwrap();
    for step in ["step-1", "step-2"] {
        fs::create_dir(here.path().join(step)).unwrap();
        fs::write(here.path().join(step).join("data"), step).unwrap();
        let _ = fs::remove_file(here.path().join("latest"));
        std::os::unix::fs::symlink(step, here.path().join("latest")).unwrap();
        ends_well(&gpunvme("hydrate").arg(here.path().join("latest")).arg(here.path().join("set")).output().unwrap());
        assert_eq!(fs::read_to_string(here.path().join("set/data")).unwrap(), step);
    }
}
