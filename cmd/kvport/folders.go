package main

import (
	"os"
	"path/filepath"
	"slices"
)

// flagSet takes a flag that is a list.
type flagSet interface {
	StringSliceVar(p *[]string, name string, value []string, usage string)
}

// addPluginPath adds --plugin-path, whose folders pluginFolders takes.
func addPluginPath(flags flagSet, folders *[]string) {
	flags.StringSliceVar(folders, "plugin-path", nil, "folders with kvport-* plugins, before KVPORT_PLUGIN_PATH and this binary's own")
}

// pluginFolders are where plugins are looked for, in order.
func pluginFolders(first []string) []string {
	folders := slices.Clone(first)
	for _, folder := range filepath.SplitList(os.Getenv("KVPORT_PLUGIN_PATH")) {
		if folder != "" {
			folders = append(folders, folder)
		}
	}
	if self, err := os.Executable(); err == nil {
		if target, err := filepath.EvalSymlinks(self); err == nil {
			self = target
		}
		folders = append(folders, filepath.Dir(self))
	}
	return folders
}
