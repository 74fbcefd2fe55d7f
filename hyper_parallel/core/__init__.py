"""The backend-neutral core: placements, meshes, layouts, norm kinds and reduction plans. Standard library only."""
