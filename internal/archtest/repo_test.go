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
	policy := Kvport()
	for _, v := range tree.Check(policy) {
		t.Error(v)
	}
	for file := range policy.Names {
		if _, ok := tree.Texts[file]; !ok {
			t.Errorf("%s: %s is not there, and may not name connectors any more", policyFile, file)
		}
	}
}
