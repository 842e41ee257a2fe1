package archtest

import "testing"

// TestRepository applies the policy to this repository.
func TestRepository(t *testing.T) {
	tree, err := Load("../..")
	if err != nil {
		t.Fatal(err)
	}
	if len(tree.Files) == 0 {
		t.Fatal("no Go file read")
	}
	for _, v := range tree.Check(Kvport()) {
		t.Error(v)
	}
}
