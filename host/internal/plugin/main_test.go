package plugin

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) { os.Exit(inOwnFolder(m)) }

// inOwnFolder runs the tests with a temporary folder of their own, so that the socket folders of other processes are
// not counted.
func inOwnFolder(m *testing.M) int {
	dir, err := os.MkdirTemp("", "plugintest")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	os.Setenv("TMPDIR", dir)
	return m.Run()
}
