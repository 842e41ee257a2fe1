// Package plugins holds the fixtures of the plugins below it, for programs that do not run in this repository.
package plugins

import (
	"embed"
	"io/fs"
)

//go:embed */fixture.json
var files embed.FS

// Fixtures are the files X/fixture.json, which package verify/fixture reads.
func Fixtures() fs.FS { return files }
