from latentfold.convert.cli import main

main()
