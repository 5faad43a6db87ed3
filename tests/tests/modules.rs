//! Compares the source with the rule of `docs/internals/architecture.md` that no module imports one
//! that imports it, as far as modules of different folders go. (Between crates Cargo keeps it.)
//!
//! The module trees of all libraries and programs of the repository are read with `syn`; tests are
//! left out. A path counts as an import of the module that defines what the path names: re-exports
//! are followed, and are themselves no imports.
//!
//! What is not built for unit tests (`test = false` in a Cargo.toml) has none.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use syn::visit::{self, Visit};

/// A module's path below the root of its crate.
type Name = Vec<String>;

/// The modules of one library or program.
#[derive(Default)]
struct Modules(BTreeMap<Name, Module>);

/// What one module declares and names.
#[derive(Default)]
struct Module {
    file: PathBuf,
    /// Paths that are imported or re-exported, by the names they get here.
    imports: BTreeMap<String, Name>,
    /// Modules all of whose names are imported or re-exported.
    globs: Vec<Name>,
    /// Names that are declared here.
    items: BTreeSet<String>,
    /// Paths that make this module depend on others: as they are written, not re-exports.
    paths: Vec<Name>,
}

impl Modules {
    /// Reads a crate from its root file.
    fn of(root: &Path) -> Modules {
        let mut modules = Modules::default();
        modules.read(Vec::new(), root, root.parent().expect("a file is in a folder"));
        modules
    }

    /// Reads the module `name` from `file`; the files of its children are in `folder`.
    fn read(&mut self, name: Name, file: &Path, folder: &Path) {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let syntax = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        self.0.insert(name.clone(), Module { file: file.to_owned(), ..Module::default() });
        let mut reader = Reader { modules: self, file, folder: folder.to_owned(), name };
        reader.visit_file(&syntax);
    }

    /// The module that defines what an absolute path names.
    fn definer(&self, path: &[String]) -> Option<&Name> {
        // Longer chains of re-exports than this go in a circle.
        self.follow(path, 16)
    }

    fn follow(&self, path: &[String], depth: u32) -> Option<&Name> {
        let depth = depth.checked_sub(1)?;
        let known = (0..=path.len()).rev().find(|len| self.0.contains_key(&path[..*len]))?;
        let (name, module) = self.0.get_key_value(&path[..known])?;
        let Some(first) = path.get(known) else { return Some(name) };
        if let Some(target) = module.imports.get(first) {
            let path: Name = target.iter().chain(&path[known + 1..]).cloned().collect();
            return self.follow(&path, depth);
        }
        if !module.items.contains(first) {
            for glob in &module.globs {
                let path: Name = glob.iter().chain(&path[known..]).cloned().collect();
                let found = self.follow(&path, depth).filter(|found| self.0[*found].items.contains(path.last().expect("a name")));
                if found.is_some() {
                    return found;
                }
            }
        }
        Some(name)
    }

    /// A path as it is written in a module, from the root of the crate. None if it leads elsewhere.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Name> {
        let (first, rest) = path.split_first()?;
        let mut base = module.to_vec();
        match first.as_str() {
            "crate" => return Some(rest.to_vec()),
            "self" => base.extend_from_slice(rest),
            "super" => {
                base.pop()?;
                let above = rest.iter().take_while(|name| *name == "super").count();
                base.truncate(base.len().checked_sub(above)?);
                base.extend_from_slice(&rest[above..]);
            }
            name => {
                base.push(name.to_owned());
                if self.0.contains_key(&base) {
                    base.extend_from_slice(rest);
                } else {
                    let target = self.0.get(module)?.imports.get(name)?;
                    base = target.iter().chain(rest).cloned().collect();
                }
            }
        }
        Some(base)
    }

    /// The files that each file imports.
    fn edges(&mut self) -> BTreeMap<&Path, BTreeSet<&Path>> {
        // Which names are modules is known only now that all are read.
        let names: Vec<_> = self.0.keys().cloned().collect();
        for name in names {
            let written = std::mem::take(&mut self.0.get_mut(&name).expect("it is there").imports);
            let found = written.into_iter().filter_map(|(to, path)| Some((to, self.absolute(&name, &path)?))).collect();
            let globs = self.0[&name].globs.iter().filter_map(|path| self.absolute(&name, path)).collect();
            let module = self.0.get_mut(&name).expect("it is there");
            (module.imports, module.globs) = (found, globs);
        }
        let mut edges = BTreeMap::<&Path, BTreeSet<&Path>>::new();
        for (name, module) in &self.0 {
            let imported = module.paths.iter().filter_map(|path| self.definer(&self.absolute(name, path)?));
            let files = imported.map(|name| self.0[name].file.as_path()).filter(|file| *file != module.file);
            edges.entry(&module.file).or_default().extend(files);
        }
        edges
    }
}

/// Reads what one module's source declares and names into [`Modules`].
struct Reader<'a> {
    modules: &'a mut Modules,
    file: &'a Path,
    /// Where the files of modules that are declared here lie.
    folder: PathBuf,
    name: Name,
}

impl Reader<'_> {
    fn module(&mut self) -> &mut Module {
        self.modules.0.get_mut(&self.name).expect("it is being read")
    }

    fn import(&mut self, tree: &syn::UseTree, before: &[String], dependency: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        let (to, path) = match tree {
            syn::UseTree::Path(path) => return self.import(&path.tree, &with(&path.ident), dependency),
            syn::UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.import(tree, before, dependency));
            }
            syn::UseTree::Glob(_) => {
                self.module().globs.push(before.to_vec());
                (None, before.to_vec())
            }
            syn::UseTree::Name(name) if name.ident == "self" => (before.last().cloned(), before.to_vec()),
            syn::UseTree::Name(name) => (Some(name.ident.to_string()), with(&name.ident)),
            syn::UseTree::Rename(rename) => (Some(rename.rename.to_string()), with(&rename.ident)),
        };
        if dependency {
            self.module().paths.push(path.clone());
        }
        if let Some(to) = to {
            self.module().imports.insert(to, path);
        }
    }
}

/// Whether an item is there in tests only.
fn is_test(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        syn::Meta::List(list) => list.path.is_ident("cfg") && list.tokens.to_string() == "test",
        meta => meta.path().is_ident("test"),
    })
}

impl<'a> Visit<'a> for Reader<'_> {
    fn visit_item(&mut self, item: &'a syn::Item) {
        let (name, attributes) = match item {
            syn::Item::Const(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Enum(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Fn(item) => (Some(&item.sig.ident), &item.attrs),
            syn::Item::Impl(item) => (None, &item.attrs),
            syn::Item::Mod(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Static(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Struct(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Trait(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Type(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Union(item) => (Some(&item.ident), &item.attrs),
            syn::Item::Use(item) => (None, &item.attrs),
            _ => return visit::visit_item(self, item),
        };
        if is_test(attributes) {
            return;
        }
        if let Some(name) = name {
            self.module().items.insert(name.to_string());
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        let ident = item.ident.to_string();
        let name = [self.name.as_slice(), std::slice::from_ref(&ident)].concat();
        let below = self.folder.join(&ident);
        if let Some((_, items)) = &item.content {
            self.modules.0.insert(name.clone(), Module { file: self.file.to_owned(), ..Module::default() });
            let mut reader = Reader { modules: self.modules, file: self.file, folder: below, name };
            items.iter().for_each(|item| reader.visit_item(item));
            return;
        }
        let files = [self.folder.join(format!("{ident}.rs")), below.join("mod.rs")];
        let file = files.iter().find(|file| file.exists()).unwrap_or_else(|| panic!("no file of {name:?}: {files:?}"));
        self.modules.read(name, file, &below);
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        let dependency = matches!(item.vis, syn::Visibility::Inherited);
        self.import(&item.tree, &[], dependency);
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        // A single name is of this module, or came in by an import.
        if path.segments.len() > 1 {
            let written = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            self.module().paths.push(written);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'a syn::Macro) {
        // What is in the parentheses need not be Rust; its paths are names between colons.
        let tokens = called.tokens.to_string().replace(" :: ", "::");
        let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
        for written in tokens.split(|c| !is_name(c)).filter(|path| path.contains("::")) {
            self.module().paths.push(written.split("::").map(str::to_owned).collect());
        }
        visit::visit_macro(self, called);
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests are a folder of the repository")
}

/// The root files of all libraries and programs of the repository's crates.
fn crates() -> Vec<PathBuf> {
    let manifest = fs::read_to_string(root().join("Cargo.toml")).expect("the workspace");
    let members = manifest.lines().find_map(|line| line.strip_prefix("members = ")).expect("its members");
    let members: Vec<String> = serde_json::from_str(members).expect("a list of folders");
    let mut roots = Vec::new();
    for source in members.iter().map(|member| root().join(member).join("src")) {
        roots.extend([source.join("lib.rs"), source.join("main.rs")]);
        for entry in fs::read_dir(source.join("bin")).into_iter().flatten() {
            let path = entry.expect("an entry").path();
            roots.push(if path.is_dir() { path.join("main.rs") } else { path });
        }
    }
    roots.retain(|root| root.exists());
    roots
}

/// All files that one can come to from `start`.
fn reach<'a>(edges: &BTreeMap<&'a Path, BTreeSet<&'a Path>>, start: &'a Path) -> BTreeSet<&'a Path> {
    let (mut reached, mut left) = (BTreeSet::new(), vec![start]);
    while let Some(file) = left.pop() {
        left.extend(edges[file].iter().filter(|file| reached.insert(**file)));
    }
    reached
}

/// The imports between files of different folders that are parts of circles, as «file imports
/// file».
fn circles(crate_root: &Path) -> Vec<String> {
    let mut modules = Modules::of(crate_root);
    let edges = modules.edges();
    let reached: BTreeMap<_, _> = edges.keys().map(|file| (*file, reach(&edges, file))).collect();
    let shown = |file: &Path| file.strip_prefix(root()).unwrap_or(file).display().to_string();
    let between = edges.iter().flat_map(|(from, to)| to.iter().map(move |to| (*from, *to)));
    let between = between.filter(|(from, to)| from.parent() != to.parent() && reached[to].contains(from));
    between.map(|(from, to)| format!("{} imports {}", shown(from), shown(to))).collect()
}

#[test]
fn a_circle_is_found_through_re_exports_and_macros() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = [
        ("lib.rs", "mod a;\nmod b;\npub use b::Inner;"),
        ("a/mod.rs", "mod one;\npub use one::One;"),
        ("a/one.rs", "use crate::Inner;\npub struct One(Inner);"),
        ("b/mod.rs", "mod inner;\nmod apart;\npub use inner::*;\n#[cfg(test)]\nmod tests;"),
        ("b/inner.rs", "pub struct Inner;\nfn show() { println!(\"{}\", crate::a::One::NAME); }"),
        ("b/apart.rs", "use super::Inner;\nstruct Apart(Inner);"),
    ];
    for (name, text) in files {
        let path = folder.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("a file");
    }
    let found = circles(&folder.path().join("lib.rs"));
    let found: Vec<_> = found.iter().map(|edge| edge.replace(&format!("{}/", folder.path().display()), "")).collect();
    assert_eq!(found, ["a/one.rs imports b/inner.rs", "b/inner.rs imports a/one.rs"]);
}

#[test]
fn no_modules_of_different_folders_import_each_other() {
    let roots = crates();
    assert!(roots.len() > 20, "only {roots:?} were found");
    let circles: Vec<_> = roots.iter().flat_map(|root| circles(root)).collect();
    assert!(circles.is_empty(), "circles between folders: {circles:#?}");
}

#[test]
fn what_is_not_built_for_unit_tests_has_none() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--offline", "--locked", "--no-deps", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let targets = packages.iter().flat_map(|package| package["targets"].as_array().unwrap());
    let untested: Vec<_> = targets.filter(|target| target["test"] == false).collect();
    assert!(!untested.is_empty());
    for target in untested {
        for module in Modules::of(Path::new(target["src_path"].as_str().unwrap())).0.values() {
            let text = fs::read_to_string(&module.file).unwrap();
            let found = ["#[test]", "#[cfg(test)]"].into_iter().find(|attribute| text.contains(attribute));
            assert_eq!(found, None, "{} is part of {}, whose `test` is false", module.file.display(), target["name"]);
        }
    }
}
